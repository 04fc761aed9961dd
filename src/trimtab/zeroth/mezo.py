"""MeZO: the slope along one random line, from a loss on either side of the weights. Numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.zeroth.settings import ZerothSettings
from trimtab.zeroth.sweep import Directions, fp32

QUERY = 0


def lanes(settings: ZerothSettings, step: int) -> Directions:
    """The two lanes of a step: weights + eps * z and weights - eps * z."""
    eps = fp32(settings.eps)
    return Directions(settings.seed, step, "normal", (QUERY, QUERY), (eps, -eps))


def slope(settings: ZerothSettings, losses: Sequence[float]) -> float:
    """The loss's slope along z."""
    return (losses[0] - losses[1]) / (2 * settings.eps)


def update(settings: ZerothSettings, step: int, losses: Sequence[float], rate: float) -> Directions:
    """What a step subtracts from the weights: rate * slope * z."""
    coefficient = fp32(rate * slope(settings, losses))
    return Directions(settings.seed, step, "normal", (QUERY,), (coefficient,))
