"""The settings of a zeroth-order run, and the learning rate of each step. Plain values: no model, no files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trimtab.errors import RequestError

Method = Literal["mezo", "dizo", "fzoo"]
Schedule = Literal["constant", "linear", "cosine", "given"]
Rounding = Literal["stochastic", "nearest"]
METHODS: tuple[Method, ...] = ("mezo", "dizo", "fzoo")
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine", "given")
# The normal numbers of fp32, in which steps are computed.
_LEAST, _MOST = 2.0**-126, 3.4e38


@dataclass(frozen=True, kw_only=True)
class ZerothSettings:
    """What a zeroth-order optimizer is asked to do."""

    method: Method = "mezo"
    learning_rate: float = 1e-6
    eps: float = 1e-3
    """How far a weight is moved to feel the slope, in units of its noise."""
    weight_decay: float = 0.0
    """Matrices shrink by learning_rate * weight_decay each step; biases and norms do not."""
    queries: int = 8
    """fzoo: one-sided perturbations a step (its N); a step costs one forward more than that."""
    interval: int = 50
    """dizo: a projection round after every so many steps (the paper's kappa)."""
    projection_eps: float = 0.1
    projection_step: float = 2.0
    projection_clip: float = 0.2
    """dizo: a tensor's distance from its start changes by at most this share in a round (the paper's tau)."""
    projection_iterations: int = 10
    """dizo: each costs two forwards, on a fresh batch."""
    projection_roles: tuple[str, ...] = ("query", "value")
    lanes: int | None = None
    """How many perturbed copies share a forward; None: one on the CPU, on a GPU a pair or (of an adapter) all."""
    compile: bool = False
    """On a GPU: compile the model's layers before they are captured. Takes a minute, makes steps up to 2x faster."""
    rounding: Rounding = "stochastic"
    """Of weights in bf16 or fp16: up or down by chance, right in the mean; to the nearest, a small step is lost."""
    seed: int = 0
    schedule: Schedule = "constant"
    """How the learning rate changes. `given`: each step is told its own, and the trajectory stores it."""
    warmup_steps: int = 0
    total_steps: int | None = None
    """Where a linear or cosine schedule reaches 0."""

    def __post_init__(self) -> None:
        checks = [
            ("method", self.method in METHODS, f"one of {', '.join(METHODS)}"),
            ("learning_rate", 0 <= self.learning_rate <= _MOST, "0 or more, within the range of fp32"),
            ("eps", _LEAST <= self.eps <= _MOST, "above 0, within the range of fp32"),
            ("weight_decay", 0 <= self.weight_decay <= _MOST, "0 or more, within the range of fp32"),
            ("queries", self.queries >= 2, "2 or more: the step is divided by the spread of the losses"),
            ("interval", self.interval >= 1, "1 or more"),
            ("projection_eps", _LEAST <= self.projection_eps <= _MOST, "above 0, within the range of fp32"),
            ("projection_step", 0 < self.projection_step <= _MOST, "above 0, within the range of fp32"),
            ("projection_clip", 0 < self.projection_clip < 1, "between 0 and 1"),
            ("projection_iterations", self.projection_iterations >= 1, "1 or more"),
            ("projection_roles", bool(self.projection_roles), "at least one role"),
            ("lanes", self.lanes is None or self.lanes >= 1, "1 or more, or null"),
            ("rounding", self.rounding in ("stochastic", "nearest"), "stochastic or nearest"),
            ("seed", 0 <= self.seed < 1 << 64, "a number of 64 bits"),
            ("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            (
                "total_steps",
                self.schedule not in ("linear", "cosine") or (self.total_steps or 0) > self.warmup_steps,
                f"more than the warm-up steps with schedule {self.schedule}",
            ),
        ]
        for name, good, wanted in checks:
            if not good:
                raise RequestError.of(
                    f"{name}: {getattr(self, name)!r}",
                    "a zeroth-order step cannot be made with it",
                    f"{name} must be {wanted}",
                )

    @property
    def passes(self) -> int:
        """Forward passes over a step's batch: the perturbed copies, and fzoo's unperturbed one."""
        return self.queries + 1 if self.method == "fzoo" else 2


def scheduled_rate(settings: ZerothSettings, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule in ("linear", "cosine"):
        assert settings.total_steps is not None
        done = min(1.0, (step - warmup) / (settings.total_steps - warmup))
        return (
            peak * (1 - done) if settings.schedule == "linear" else peak * (1 + math.cos(math.pi * done)) / 2
        )
    return peak
