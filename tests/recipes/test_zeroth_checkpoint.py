"""Checkpoints of a zeroth-order run: which is the best, and what it holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from trimtab.manifest import MANIFEST
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.zeroth_checkpoint import Progress, load_checkpoint, save_checkpoint


def went(*steps: tuple[int, float, bool]) -> Progress:
    """A run's steps, each with its held-out loss and whether it was saved."""
    progress = Progress()
    for progress.step, loss, saved in steps:
        progress.add({"loss": loss})
        if saved:
            progress.saved()
    return progress


@pytest.mark.parametrize(
    ("steps", "best"),
    [
        ([(0, 0.1, True), (1, 0.9, True), (2, 0.8, True), (3, 0.85, True)], 2),
        # Of a step without a checkpoint there are no weights to keep.
        ([(1, 0.9, True), (2, 0.1, False), (3, 0.8, True)], 3),
        ([(1, math.nan, True), (2, 0.8, True), (3, math.inf, True)], 2),
        ([(1, math.nan, True)], None),
        ([(0, 0.5, True)], None),
    ],
)
def test_the_best_is_the_lowest_loss_that_was_saved(
    steps: list[tuple[int, float, bool]], best: int | None
) -> None:
    assert went(*steps).best_step == best


def test_a_step_that_was_saved_but_never_measured_is_not_the_best() -> None:
    progress = went((1, 0.9, True))
    progress.step = 2
    progress.saved()
    assert (progress.best_step, progress.best_loss) == (1, 0.9)


@pytest.mark.parametrize("name", ["state.json", "trainer_state.json"])
def test_a_checkpoint_of_an_earlier_version_is_read(name: str, tmp_path: Path) -> None:
    """It has no manifest, and a still earlier one named its state as transformers does."""
    run, saved, loaded = RunFolder(tmp_path), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    state = {"forwards": 8, "anchors": {"weight": torch.ones(1, 2)}}
    folder = save_checkpoint(run, saved, state, went((0, 0.5, True), (3, 0.4, True)))
    assert sorted(file.name for file in folder.glob("*.json")) == ["state.json", MANIFEST]
    (folder / MANIFEST).unlink()
    (folder / "state.json").rename(folder / "aside")
    assert run.newest_checkpoint() is None
    (folder / "aside").rename(folder / name)
    assert run.newest_checkpoint() == folder
    optimizer, progress = load_checkpoint(folder, loaded)
    assert optimizer["forwards"] == 8
    assert torch.equal(optimizer["anchors"]["weight"], torch.ones(1, 2))
    assert (progress.step, progress.best_step) == (3, 3)
    assert torch.equal(loaded.weight, saved.weight)
