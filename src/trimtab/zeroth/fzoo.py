"""FZOO: N one-sided perturbations by signs; the step is divided by the spread of their losses. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.zeroth.settings import ZerothSettings
from trimtab.zeroth.sweep import Directions, fp32


def lanes(settings: ZerothSettings, step: int) -> Directions:
    """Lane 0 is the weights as they are, lane i the weights + eps * z_i, for i from 1 to N."""
    eps, count = fp32(settings.eps), settings.queries
    return Directions(settings.seed, step, "signs", tuple(range(count + 1)), (0.0, *[eps] * count))


def slopes(settings: ZerothSettings, losses: Sequence[float]) -> tuple[float, ...] | None:
    """(l_i - l_0) / (N * std of l_1..l_N); None where all N losses are the same, and there is no scale to divide by."""
    base, others = losses[0], losses[1:]
    count = len(others)
    mean = _total(others) / count
    # A product: `** 2` is the C library's pow, which rounds otherwise from one library to the next.
    spread = math.sqrt(_total([(loss - mean) * (loss - mean) for loss in others]) / count)
    return None if spread == 0 else tuple((loss - base) / (count * spread) for loss in others)


def update(settings: ZerothSettings, step: int, losses: Sequence[float], rate: float) -> Directions | None:
    """What a step subtracts from the weights: rate * slope_i * z_i for every i. None: the step is skipped."""
    found = slopes(settings, losses)
    if found is None:
        return None
    coefficients = tuple(fp32(rate * slope) for slope in found)
    return Directions(settings.seed, step, "signs", tuple(range(1, len(found) + 1)), coefficients)


def _total(values: Sequence[float]) -> float:
    """In order and without compensation: `sum` adds differently from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
