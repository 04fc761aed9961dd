"""A full GPU: a program that handles it and then runs within the memory is right; one that ends there is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_gpus import ENDS, GOES_ON, HEAD

Rehearse = Callable[..., dict[str, Any]]
SETTINGS = {"gpus": 1, "shapes_only": True, "memory_bytes": 3 << 30}


def written(folder: Path, name: str, programs: dict[str, str]) -> Path:
    """Each under a name of its own: the process that stays warm remembers what it has read."""
    path = folder / f"{''.join(filter(str.isalpha, name))}.py"
    path.write_text(HEAD + programs[name])
    return path


@pytest.mark.parametrize("name", GOES_ON)
def test_a_full_gpu_that_the_program_handles(ask: Rehearse, tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, GOES_ON)
    report = ask(str(path), ranks=None, timeout=120, settings=SETTINGS)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]
    assert report["memory"]["cuda:0"]["peak_bytes"] < 3 << 30
    assert any("is full at" in note and "catches that" in note for note in report["notes"])


@pytest.mark.parametrize("name", ENDS)
def test_a_full_gpu_that_ends_the_program(ask: Rehearse, tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, ENDS)
    report = ask(str(path), ranks=None, timeout=120, settings=SETTINGS)
    (finding,) = report["findings"]
    assert (report["verdict"], finding["kind"]) == ("fault", "out-of-memory"), report["text"]
    assert finding["lack"]["short_bytes"] > 0, finding["lack"]
    assert not any("goes on" in note for note in report["notes"])
