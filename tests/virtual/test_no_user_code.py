"""Where no user's code has run, as with a config, no stack is searched for it; from its first line on it is found."""

from __future__ import annotations

import json

import pytest
import torch

from trimtab.virtual import origin
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    files = {torch.__file__, "<string>"}
    for name, value in (("_executed", None), ("_looked_at", 0), ("_user_ran", False)):
        monkeypatch.setattr(origin, name, value)
    origin.tell_by(files)
    return files


def test_lines_are_found_from_the_moment_at_which_a_users_file_runs(executed: set[str]) -> None:
    with virtual_gpus(1, observer=Observer()):
        before = torch.ones(3, device="cuda")
        assert origin.here() is None
        executed.add(__file__)
        after = before + 1
        assert origin.born_of(before) is None
        born = origin.born_of(after)
        assert born is not None
        assert born.file == __file__


def test_questions_of_one_line_are_counted_each(executed: set[str]) -> None:
    executed.add(__file__)
    with virtual_gpus(1, shapes=True, observer=Observer()) as machine:
        values = torch.randn(512, 1024, device="cuda").sum(1).tolist()
        machine.asked.clear()
        assert all(value > 0 for value in values)
        (told, count), *more = machine.asked.items()
        assert (told.how, count, more) == ("decision", 512, [])
        assert told.frame is not None
        assert told.frame.file == __file__


def test_to_write_an_unknown_number_as_json_is_no_decision(executed: set[str]) -> None:
    executed.add(__file__)
    with virtual_gpus(1, shapes=True) as machine:
        loss = torch.randn(512, 1024, device="cuda").sum().item()
        json.dumps({"loss": loss}, indent=2, sort_keys=True)
        assert {told.how for told in machine.asked} == {"value"}
