"""Files of a run that are nested without end, or hold a value of another kind: told, or read as if there were none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trimtab.errors import RequestError
from trimtab.manifest import Damaged
from trimtab.models.own_code import code_options
from trimtab.monitor.board import VERDICT, reports_in, verdict_in
from trimtab.recipes.agent import _told_to_end
from trimtab.recipes.elastic import _failures, _kept_before
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.starts import kept_start, read_starts
from trimtab.recipes.unsealed import check_unsealed
from trimtab.recipes.zeroth_checkpoint import Progress, load_checkpoint, save_checkpoint

BAD = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"[1]",
    b"null",
    b"",
    b'{"progress": 3, "optimizer": {}}',
]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_a_runs_own_notes(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan.json", "summary.json", "failures.jsonl", "rank0.json", VERDICT):
        (tmp_path / name).write_bytes(content)
    assert _kept_before(tmp_path) is None
    assert _failures(tmp_path / "failures.jsonl") == []
    assert reports_in(tmp_path) == []
    assert verdict_in(tmp_path, 0.0) is None
    assert _told_to_end(SimpleNamespace(sigval=15), tmp_path) == 1
    assert "before a whole step was saved" in capsys.readouterr().err


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_the_state_of_a_checkpoint(content: bytes, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    folder = save_checkpoint(RunFolder(tmp_path), model, {"step": 1}, Progress(step=1))
    state = next(file for file in folder.iterdir() if file.name == "state.json")
    state.write_bytes(content)
    with pytest.raises(RequestError, match="state") as caught:
        load_checkpoint(folder, model)
    assert "change:" in str(caught.value)


@pytest.mark.parametrize("content", BAD[:3], ids=range(3))
def test_the_files_that_name_other_code(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    settings = SimpleNamespace(name=str(tmp_path), trust_remote_code=[str(tmp_path)], revision=None)
    with pytest.raises(RequestError, match=r"config\.json"):
        code_options(settings, str(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", ["x", [], {}, None, 1e400, 0.5])
def test_a_plan_that_does_not_tell_its_processes_is_not_compared(processes: object, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: sft\n")
    (tmp_path / "plan.json").write_text(json.dumps({"processes": processes}))
    kept = kept_start(tmp_path, read_starts(tmp_path))
    assert kept is not None
    assert "plan" not in kept.facts


@pytest.mark.parametrize(
    "changed", [{"epoch": "one"}, {"max_steps": [2]}, {"epoch": 1e400}, {"global_step": None}]
)
def test_a_trainers_state_of_other_kinds_is_damaged(changed: dict[str, object], tmp_path: Path) -> None:
    state = {"global_step": 2, "epoch": 1.0, "max_steps": 4} | changed
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(Damaged, match="trainer_state"):
        check_unsealed(tmp_path)
