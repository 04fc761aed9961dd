"""Zeroth-order fine-tuning: MeZO, DiZO and FZOO at the speed of forward passes. Needs torch alone.

Noise is a function of a counter, perturbed weights are made in scratch inside the forward, and only a step writes to a
weight. `ZerothOrder` is the way in; see its docstring.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.zeroth.objective import (
        Example,
        ScoreBatch,
        build_batch,
        candidate_scores,
        example_losses,
    )
    from trimtab.zeroth.optimizer import NotFinite, ProjectionResult, StepResult, ZerothOrder
    from trimtab.zeroth.parameters import Tuned, projected_parameters, tuned_parameters
    from trimtab.zeroth.settings import ZerothSettings, scheduled_rate
    from trimtab.zeroth.trajectory import Trajectory, TrajectoryWriter, read_trajectory, replay

__all__ = [
    "Example",
    "NotFinite",
    "ProjectionResult",
    "ScoreBatch",
    "StepResult",
    "Trajectory",
    "TrajectoryWriter",
    "Tuned",
    "ZerothOrder",
    "ZerothSettings",
    "build_batch",
    "candidate_scores",
    "example_losses",
    "projected_parameters",
    "read_trajectory",
    "replay",
    "scheduled_rate",
    "tuned_parameters",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # Settings first: they need no torch.
        for home in ("settings", "objective", "parameters", "trajectory", "optimizer"):
            module = import_module(f"trimtab.zeroth.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
