"""Each method's arithmetic behind one set of names: from losses to what the weights do. A replay needs no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trimtab.zeroth import fzoo, mezo
from trimtab.zeroth.dizo import Round
from trimtab.zeroth.parameters import Tuned
from trimtab.zeroth.settings import ZerothSettings
from trimtab.zeroth.sweep import Directions, Sweep, fp32

__all__ = ["Round", "apply_round", "step_lanes", "step_shrink", "step_slopes", "step_update"]


def step_lanes(settings: ZerothSettings, step: int) -> Directions:
    """The lanes whose losses a step compares."""
    return fzoo.lanes(settings, step) if settings.method == "fzoo" else mezo.lanes(settings, step)


def step_slopes(settings: ZerothSettings, losses: Sequence[float]) -> tuple[float, ...]:
    """The slope along each direction; none where the step is skipped."""
    if settings.method == "fzoo":
        return fzoo.slopes(settings, losses) or ()
    return (mezo.slope(settings, losses),)


def step_update(
    settings: ZerothSettings, step: int, losses: Sequence[float], rate: float
) -> Directions | None:
    """What a step subtracts from the weights; None: it is skipped."""
    if settings.method == "fzoo":
        return fzoo.update(settings, step, losses, rate)
    return mezo.update(settings, step, losses, rate)


def step_shrink(settings: ZerothSettings, rate: float) -> float:
    """The factor of weight decay."""
    return fp32(1 - rate * settings.weight_decay)


def apply_round(
    sweep: Sweep, projected: Sequence[Tuned], anchors: Mapping[int, Tensor], search: Round
) -> None:
    """Write the ratios that a finished round found into the weights."""
    ratios = search.ratios
    for each in projected:
        sweep.rescale_(each, anchors[each.index], ratios[each.index], search.seed, search.step)
