"""Python's search for garbage while a rehearsed program imports, and after."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from trimtab.rehearse import collecting


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collecting, "_before", None)
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_it_is_put_off_and_resumed() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    collecting.put_off()
    assert gc.get_threshold() > before
    collecting.resume()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == frozen


def test_libraries_are_not_looked_at_again_where_no_model_is_there() -> None:
    frozen = gc.get_freeze_count()
    collecting.put_off()
    collecting.resume(models=False)
    assert gc.get_freeze_count() > frozen


def test_what_the_program_sets_stays() -> None:
    collecting.put_off()
    gc.set_threshold(5, 6, 7)
    collecting.resume(models=False)
    assert gc.get_threshold() == (5, 6, 7)
    collecting.put_off()
    collecting.resume()
    assert gc.get_threshold() == (5, 6, 7)
