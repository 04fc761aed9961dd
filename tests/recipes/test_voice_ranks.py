"""Two processes train a voice as one does: by DDP and by FSDP2, also with an evaluation of an odd number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from many_processes import start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Told = tuple[list[dict[str, Any]], list[dict[str, float | None]], dict[str, torch.Tensor]]
PARTS = ["loss", "text_loss", "audio_loss", *(f"audio_loss_{book}" for book in range(4))]


def launch(processes: int, strategy: str, out: Path, batch: int) -> list[Told]:
    """What each process has to tell."""
    start(processes, "voice_training.py", [strategy, out, batch], out)
    return [torch.load(f"{out}-rank{rank}.pt") for rank in range(processes)]


@pytest.mark.parametrize("strategy", ["data_parallel", "sharded"])
def test_two_processes_make_the_run_of_one(strategy: str, tmp_path: Path) -> None:
    """Two with a batch of 1, one with a batch of 2: every row of a step is the same."""
    [(one, gradients, _)] = launch(1, "single", tmp_path / "one", 2)
    (two, left, weights), (_, right, others) = launch(2, strategy, tmp_path / "two", 1)
    assert left == right, "the processes got the same gradients"
    assert all(torch.equal(weights[name], others[name]) for name in weights), "and stay identical"
    assert left[0] == pytest.approx(gradients[0], rel=1e-3, abs=1e-6)
    for name in (*PARTS, *(f"eval_{part}" for part in PARTS)):
        wanted, found = ([line[name] for line in run if name in line] for run in (one, two))
        assert len(wanted) == (4 if name.startswith("eval_") else 6), name
        # Five rows are evaluated: the second process gets one of them twice, and counts it once.
        assert found[:2] == pytest.approx(wanted[:2], rel=1e-4), name
        assert found == pytest.approx(wanted, rel=5e-3), name
