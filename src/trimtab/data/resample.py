"""Another sample rate for the same sound: a windowed sinc, one set of weights for each phase of the two rates.

What the lower of the two rates cannot hold is taken out (80 dB down), and nothing folds back. Exact in time: sample m
of the result is the sound at m / to.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

ZEROS = 64
"""Zeros of the sinc on each side, in samples of the lower rate."""
BETA = 7.86
"""Of the Kaiser window: 80 dB."""
ROLLOFF = 0.96
"""Half amplitude, as a share of the lower rate's half. With this window all is gone at that half, and all is there up
to 92 % of it."""

Samples = npt.NDArray[np.float32]

_SQUARES = np.linspace(0.0, 1.0, 4097)
# By the square of the distance it is smooth to its very end, and a straight line between two entries is near enough.
_WINDOW = np.i0(BETA * np.sqrt(1 - _SQUARES))


def resample(samples: Samples, rate: int, to: int) -> Samples:
    """The samples at `to` a second instead of `rate`: ceil(n * to / rate) of them. Before and after is silence."""
    if rate < 1 or to < 1:
        raise ValueError(f"sample rates {rate} and {to}: both are at least 1")
    samples = np.ascontiguousarray(samples, dtype=np.float32)
    if rate == to or not samples.size:
        return samples.copy()
    common = math.gcd(rate, to)
    up, down = to // common, rate // common
    cutoff = ROLLOFF * min(1.0, to / rate)
    half = math.ceil(ZEROS / cutoff)
    number = -(-len(samples) * up // down)
    padded = np.concatenate([np.zeros(half - 1, np.float32), samples, np.zeros(half + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    # Whole periods are taken together until the windows of one phase do not overlap: then their product with the
    # weights is one call of BLAS that copies nothing.
    periods = -(-2 * half // down)
    found = np.empty(number, np.float32)
    for first in range(min(up * periods, number)):
        before, phase = divmod(first * down, up)
        of_phase = found[first :: up * periods]
        rows = windows[before :: down * periods][: len(of_phase)]
        of_phase[:] = rows @ _weights(phase / up, half, cutoff)
    return found


def _weights(shift: float, half: int, cutoff: float) -> Samples:
    """Of the samples around a place that lies `shift` of a sample after the one in the middle."""
    away = np.arange(1 - half, half + 1) - shift
    weights = np.sinc(cutoff * away) * np.interp((away / half) ** 2, _SQUARES, _WINDOW)
    # Of sum one in each phase: a constant stays what it is.
    found: Samples = (weights / weights.sum()).astype(np.float32)
    return found
