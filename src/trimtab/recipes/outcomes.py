"""Figures of a run that recipes share, from what its trainer logged. It measures only what was not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.recipes.recipe import Job

if TYPE_CHECKING:
    from trimtab.recipes.trainer_driver import TrainerDriver


def held_out_loss(job: Job, driver: TrainerDriver) -> dict[str, Any]:
    """Held-out loss before the first step, and of the weights that are kept."""
    if driver.ended_early:
        return {}
    losses = [entry for entry in driver.history if "eval_loss" in entry]
    after = driver.best
    if after is None and losses and losses[-1]["step"] == driver.steps[0]:
        after = losses[-1]["eval_loss"]
    if after is None and job.prepared.eval is not None:
        after = driver.trainer.evaluate()["eval_loss"]
    before = next((entry["eval_loss"] for entry in losses if entry["step"] == 0), None)
    return {"eval_loss": {"before": before, "after": after}}
