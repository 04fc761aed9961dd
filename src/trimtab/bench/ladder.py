"""The ladder of a faster training step: its rows, one change each on top of the row before. It runs nothing.

The first row computes as PEFT's and the model's own code do; every other adds one part of `speed` (or the fused
optimizer). Which parts a machine, a recipe and a model can have is the plan's to say, whose reason is told where a row
is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.placement import PlacementPlan

PLAIN: Mapping[str, Any] = {
    "speed.adapters": "plain",
    "speed.head": "plain",
    "speed.compile": False,
    "speed.padding": "padded",
    "speed.kernels": "plain",
}
OPTIMIZER = "training.optimizer"
STEPWISE, FUSED = "adamw_torch", "adamw_torch_fused"
_ADAMW = ("auto", STEPWISE, FUSED)


@dataclass(frozen=True)
class Rung:
    """One row: what it adds to the one before."""

    name: str
    title: str
    setting: str
    value: Any


RUNGS = (
    Rung("padding", "+ no padding", "speed.padding", "none"),
    Rung("head", "+ head in chunks", "speed.head", "chunked"),
    Rung("adapters", "+ fused adapters", "speed.adapters", "fused"),
    Rung("compile", "+ layers compiled", "speed.compile", True),
    Rung("kernels", "+ MLP by kernels", "speed.kernels", "triton"),
    Rung("optimizer", "+ fused optimizer", OPTIMIZER, FUSED),
)
FIRST, LAST = "plain", "default"
TITLES = {FIRST: "plain", **{rung.name: rung.title for rung in RUNGS}, LAST: "as planned by default"}


def start(optimizer: str) -> dict[str, Any]:
    """The settings of the first row, over the user's config."""
    return {**PLAIN, **({OPTIMIZER: STEPWISE} if optimizer in _ADAMW else {})}


def why_not(rung: Rung, plan: PlacementPlan, optimizer: str) -> str | None:
    """Why a row is not for this machine, recipe or config, in the plan's words; None: it can be run."""
    if rung.setting == OPTIMIZER:
        return None if optimizer in _ADAMW else f"training.optimizer is {optimizer}"
    chosen = getattr(plan.speed, rung.setting.removeprefix("speed."))
    return None if chosen == rung.value else plan.reasons[rung.setting]
