"""Errors that a worker process raised: told at the worker's own line, and only where they end the program."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines, named_lines

Rehearse = Callable[..., dict[str, Any]]

READER = """
    import concurrent.futures
    import multiprocessing
    import torch
    from torch.utils.data import DataLoader

    def inner(row):
        return row["question"]  # where, cause

    def read(row):
        return len(inner(row))

    rows = [{"query": "what?", "label": 1}] * 4
    """
WAYS = {
    "a pool": "with multiprocessing.Pool(1) as pool:\n    print(pool.map(read, rows))\n",
    "an executor": (
        "with concurrent.futures.ProcessPoolExecutor(1) as pool:\n    print(list(pool.map(read, rows)))\n"
    ),
    "a loader": "for batch in DataLoader(rows, num_workers=2, collate_fn=lambda rows: read(rows[0])):\n    pass\n",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_line_in_the_worker_is_told(way: str, rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(READER) + way)
    report = rehearse_warm(str(path))
    assert report["verdict"] == "fault", report["text"]
    assert len(report["findings"]) == 1, report["text"]
    assert named_lines(report, "where") == marked_lines(path, "where"), report["text"]
    assert named_lines(report, "cause") == marked_lines(path, "cause"), report["text"]
    assert "'query' is likely" in report["findings"][0]["cause"]["why"]


def test_an_error_that_the_program_catches_is_none(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    caught = textwrap.indent(WAYS["a loader"], "    ")
    handled = "except KeyError:\n    print('skipped', torch.ones(1).cuda())\n"
    path.write_text(f"{textwrap.dedent(READER)}try:\n{caught}{handled}")
    report = rehearse_warm(str(path))
    assert report["verdict"] == "clean", report["text"]
    assert report["findings"] == []
    assert "skipped" in report["stdout"]
