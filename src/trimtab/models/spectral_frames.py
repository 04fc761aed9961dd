"""Between sound and short frames of its spectrum: windows, mel bands, and phases found again by Griffin and Lim's way.

Frames lie on a fixed grid: frame j stands for the `hop` samples from j * hop on, and is seen through a longer window
around their middle. Whatever lies outside the clip counts as silence, so a clip's frames do not depend on silence put
behind it. Nothing is learned here, and nothing is drawn at random: the same frames give the same sound.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

EXACT: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
"""Tables are made so, also where transformers builds a model without its values."""


class Frames:
    """The grid and the bands, for one rate of samples."""

    def __init__(self, rate: int, hop: int, window: int, bands: int) -> None:
        self.hop, self.window = hop, window
        self.margin = (window - hop) // 2
        """Samples that the first and the last window reach beyond the clip."""
        self._filters = mel_filters(rate, window, bands)
        shape = torch.hann_window(window, **EXACT)
        # A full-scale sine has magnitude 1, so that a level means the same for every window.
        self._shape, self._scale = shape.float(), 2 / float(shape.sum())

    def magnitudes(self, sound: Tensor) -> Tensor:
        """(batch, samples) to (batch, frames, window / 2 + 1)."""
        padded = functional.pad(sound, (self.margin, self.margin))
        return self._spectrum(padded).abs() * self._scale

    def bands(self, magnitudes: Tensor) -> Tensor:
        """The mean magnitude in each band."""
        return magnitudes @ self._filters.to(magnitudes.device)

    def from_bands(self, bands: Tensor, rounds: int = 60) -> Tensor:
        """Magnitudes that are nowhere negative and whose bands are these, as nearly as that goes.

        Lee and Seung's rule for the least squares; it starts from each bin's share of its bands.
        """
        filters = self._filters.to(bands.device)
        inner = filters @ filters.T
        wanted = bands @ filters.T
        found = wanted / filters.sum(1).clamp(min=1e-8)
        for _ in range(rounds):
            found = found * (wanted / (found @ inner).clamp(min=1e-12))
        return found

    def sound(self, magnitudes: Tensor, rounds: int, momentum: float) -> Tensor:
        """(batch, frames, bins) to (batch, frames * hop): a sound that has these magnitudes, as nearly as that goes.

        Griffin and Lim's way with the momentum of Perraudin, Balazs and Søndergaard. Phases start as those of steady
        tones in the middle of each bin.
        """
        wanted = magnitudes / self._scale
        frames, bins = wanted.shape[-2:]
        centre = torch.arange(frames, **EXACT)[:, None] * self.hop
        turn = torch.arange(bins, **EXACT)[None] * (2 * math.pi / self.window)
        angles = torch.remainder(centre * turn, 2 * math.pi).float().to(wanted.device)
        spectrum = torch.polar(wanted, angles.expand_as(wanted))
        previous = torch.zeros_like(spectrum)
        for _ in range(rounds):
            possible = self._spectrum(self._overlapped(spectrum))
            ahead = possible + momentum * (possible - previous)
            previous = possible
            spectrum = wanted * ahead / ahead.abs().clamp(min=1e-12)
        return self._overlapped(spectrum)[:, self.margin : self.margin + frames * self.hop]

    def _spectrum(self, padded: Tensor) -> Tensor:
        windows = padded.unfold(-1, self.window, self.hop) * self._shape.to(padded.device)
        spectrum: Tensor = torch.fft.rfft(windows)
        return spectrum

    def _overlapped(self, spectrum: Tensor) -> Tensor:
        """The sound whose windows come nearest to these."""
        shape = self._shape.to(spectrum.device)
        pieces = torch.fft.irfft(spectrum, n=self.window) * shape
        weight = (shape * shape).expand(1, pieces.shape[1], -1)
        # At the outermost samples only the feet of windows lie, by which nothing can be divided; they are cut away.
        return self._laid(pieces) / self._laid(weight).clamp(min=1e-3)

    def _laid(self, pieces: Tensor) -> Tensor:
        """The pieces, added up where they lie."""
        count = (pieces.shape[1] - 1) * self.hop + self.window
        columns = pieces.transpose(1, 2)
        laid: Tensor = functional.fold(columns, (1, count), (1, self.window), stride=(1, self.hop))
        return laid[:, 0, 0]


@lru_cache(maxsize=8)
def mel_filters(rate: int, window: int, bands: int) -> Tensor:
    """(bins, bands): triangles that overlap by half on the mel scale, up to half the rate; each sums to one.

    A triangle is averaged over each bin's width, so that one narrower than a bin is not lost between two of them.
    """
    top = 2595 * math.log10(1 + rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, bands + 2, **EXACT) / 2595) - 1)
    bins, parts = window // 2 + 1, 16
    offsets = (torch.arange(parts, **EXACT) + 0.5) / parts - 0.5
    places = (torch.arange(bins, **EXACT)[:, None] + offsets) * (rate / window)
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    at = places[..., None]
    triangles = torch.minimum((at - low) / (middle - low), (high - at) / (high - middle)).clamp(min=0).mean(1)
    return (triangles / triangles.sum(0)).float()
