"""The arithmetic of a step, from its losses to what the weights do. Numbers only; a replay needs no more.

MeZO, and DiZO between its rounds: the slope along one random line, from a loss on either side of the weights. FZOO: N
one-sided perturbations by signs; the step is divided by the spread of their losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from trimtab.zeroth.dizo import Round
from trimtab.zeroth.parameters import Tuned
from trimtab.zeroth.settings import ZerothSettings
from trimtab.zeroth.sweep import Directions, Sweep, fp32


def step_lanes(settings: ZerothSettings, step: int) -> Directions:
    """The lanes whose losses a step compares: weights + eps * z and weights - eps * z.

    FZOO: lane 0 is the weights as they are, lane i the weights + eps * z_i, for i from 1 to N.
    """
    eps, count = fp32(settings.eps), settings.queries
    if settings.method == "fzoo":
        return Directions(settings.seed, step, "signs", tuple(range(count + 1)), (0.0, *[eps] * count))
    return Directions(settings.seed, step, "normal", (0, 0), (eps, -eps))


def step_slopes(settings: ZerothSettings, losses: Sequence[float]) -> tuple[float, ...]:
    """The slope along each direction; none where the step is skipped.

    FZOO: (l_i - l_0) / (N * std of l_1..l_N). Where all N losses are the same, there is no scale to divide by.
    """
    if settings.method != "fzoo":
        return ((losses[0] - losses[1]) / (2 * settings.eps),)
    base, others = losses[0], losses[1:]
    count = len(others)
    mean = _total(others) / count
    # A product: `** 2` is the C library's pow, which rounds otherwise from one library to the next.
    spread = math.sqrt(_total([(loss - mean) * (loss - mean) for loss in others]) / count)
    return () if spread == 0 else tuple((loss - base) / (count * spread) for loss in others)


def step_update(
    settings: ZerothSettings, step: int, losses: Sequence[float], rate: float
) -> Directions | None:
    """What a step subtracts from the weights: rate * slope * z along every direction; None: it is skipped."""
    coefficients = tuple(fp32(rate * slope) for slope in step_slopes(settings, losses))
    if not coefficients:
        return None
    # Behind the first lane: MeZO's one line, which has two ends, and FZOO's N.
    lanes = step_lanes(settings, step)
    return replace(lanes, queries=lanes.queries[1:], coefficients=coefficients)


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


def _total(values: Sequence[float]) -> float:
    """In order and without compensation: `sum` adds differently from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
