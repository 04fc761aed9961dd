"""A clip's spectrogram as a PNG: time to the right, pitch upwards on the mel scale, level as colour.

All are drawn by the same scale, so that clips can be compared by eye. Text is not drawn: the page writes the axes.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

WINDOW = 1024
HEIGHT = 96
"""Rows of pixels, each a band of pitches."""
COLUMNS_A_SECOND, WIDEST = 100, 900
SOFTEST, LOUDEST = -90.0, -15.0
"""Decibels that the darkest and the brightest colour stand for; a sine at full scale has 0."""
TICKS = (500, 1000, 2000, 4000, 8000)
_COLOURS = (
    (6, 6, 24),
    (44, 18, 92),
    (124, 30, 110),
    (196, 52, 86),
    (244, 122, 48),
    (252, 204, 92),
    (255, 252, 230),
)


def spectrogram(samples: Samples, rate: int) -> bytes:
    """The picture of these samples, one channel; its width grows with their length."""
    from PIL import Image

    levels = _levels(samples, rate)
    shades = np.clip((levels - SOFTEST) / (LOUDEST - SOFTEST) * 255, 0, 255).astype(np.uint8)
    image = Image.fromarray(np.ascontiguousarray(shades.T[::-1])).convert("P")
    image.putpalette(_palette().tobytes())
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def heights(rate: int) -> dict[int, float]:
    """How high each of the pitches stands on the picture's axis, from 0 to 1; those that a clip can hold."""
    top = _mel(rate / 2)
    return {hertz: float(_mel(hertz) / top) for hertz in TICKS if hertz < rate / 2 * 0.95}


def _levels(samples: Samples, rate: int) -> npt.NDArray[np.float64]:
    """Decibels, (columns, bands)."""
    hop = max(rate // COLUMNS_A_SECOND, len(samples) // WIDEST, 1)
    columns = max(1, len(samples) // hop)
    # Half a window of silence before the first sample: a column stands for the time in its middle.
    padded = np.pad(samples.astype(np.float64), (WINDOW // 2, WINDOW))
    views = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: columns * hop : hop]
    window = np.hanning(WINDOW + 1)[:-1]
    power = np.abs(np.fft.rfft(views * window) / (window.sum() / 2)) ** 2
    levels: npt.NDArray[np.float64] = 10 * np.log10(power @ _bands(rate) + 1e-12)
    return levels


def _bands(rate: int) -> npt.NDArray[np.float64]:
    """(bins, bands): what each band takes of each bin, at least two bins' worth, so that none stays dark."""
    edge = _mel(rate / 2)
    centres = _hertz((np.arange(HEIGHT) + 0.5) / HEIGHT * edge)
    bins = np.fft.rfftfreq(WINDOW, 1 / rate)
    reach = np.maximum(np.gradient(centres), rate / WINDOW)
    weights = np.clip(1 - np.abs(bins[:, None] - centres) / reach, 0, None)
    shares: npt.NDArray[np.float64] = weights / weights.sum(axis=0)
    return shares


def _mel(hertz: Any) -> Any:
    return 2595 * np.log10(1 + np.asarray(hertz) / 700)


def _hertz(mel: Any) -> Any:
    return 700 * (10 ** (mel / 2595) - 1)


def _palette() -> npt.NDArray[np.uint8]:
    """256 colours from dark to bright, evenly between the given ones."""
    places = np.linspace(0, len(_COLOURS) - 1, 256)
    given = np.array(_COLOURS, dtype=float)
    mixed = [np.interp(places, np.arange(len(_COLOURS)), given[:, part]) for part in range(3)]
    return np.stack(mixed, axis=1).round().astype(np.uint8)
