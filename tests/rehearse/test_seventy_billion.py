"""A model of 70 billion weights, tuned by LoRA on eight GPUs of 80 GB, rehearsed from its config alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rehearse = Callable[..., dict[str, Any]]
WEIGHTS = 70_553_706_496
GPU = 80 * 2**30
HERE = 1_500_000_000
"""Bytes that a rehearsal may take of this machine."""

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "seventy_billion.py"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded", "split"])
def test_it_fits_and_so_does_the_rehearsal(rehearse: Rehearse, way: str) -> None:
    ranks = 8 if way == "sharded" else None
    report = rehearse(str(SCRIPT), way, ranks=ranks, timeout=540, gpus=8, memory_bytes=GPU, shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    peaks = [figures["peak_bytes"] for figures in report["memory"].values()]
    assert len(peaks) == 8
    assert sum(peaks) > 2 * WEIGHTS
    assert max(peaks) < GPU // 2
    found = re.search(r"resident (\d+)", report["stdout"])
    assert found is not None
    assert int(found[1]) < HERE
    assert bool(report["collectives"]) == (way == "sharded")
