"""What a model said, as sound: how it is told, whether it can be heard, and its file. It computes no speech."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.data.sound import loudness, peak, write_wav

if TYPE_CHECKING:
    import torch

LOUDEST = 0.99
"""The highest peak of a written clip: players differ in what they do at full scale."""


@dataclass(frozen=True)
class Spoken:
    """One clip that a model said."""

    samples: np.ndarray[Any, np.dtype[np.float32]]
    rate: int
    codes: torch.Tensor
    """(frames, codebooks), on the CPU, without BOS, EOS and delay."""
    ended: bool
    """Whether it stopped by itself; otherwise it was cut off at `voice.max_seconds`."""
    fault: str | None = None
    """Why there is no sound, where what was computed is none."""

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    @property
    def peak(self) -> float:
        return peak(self.samples)

    @property
    def loudness(self) -> float:
        """Decibels of full scale, of its loudest tenth of a second."""
        return loudness(self.samples, self.rate)

    def unheard(self, silence: float) -> str | None:
        """Why nobody can hear it; None where one can. `silence` is in decibels of full scale."""
        if self.fault is not None:
            return self.fault
        if not len(self.samples):
            return "it ended before its first sound"
        if self.loudness < silence:
            return f"it is silent: its loudest tenth of a second has {self.loudness:.1f} dBFS"
        return None

    def told(self, silence: float) -> str:
        """In one line, such as `2.04 s, ended by itself, peak 0.71, -14.2 dBFS`."""
        said = f"{self.seconds:.2f} s, {'ended by itself' if self.ended else 'cut off: it did not end'}"
        unheard = self.unheard(silence)
        if unheard is not None:
            return f"could not be heard: {unheard}" + (f" ({said})" if len(self.samples) else "")
        return f"{said}, peak {self.peak:.2f}, {self.loudness:.1f} dBFS"

    def write(self, path: Path) -> str | None:
        """Its file: 16 bits, one channel. Gives a remark where it was too loud to be written as it is."""
        highest = self.peak
        scale = min(1.0, LOUDEST / highest) if highest else 1.0
        write_wav(path, self.samples * np.float32(scale), self.rate)
        if scale < 1:
            return f"made quieter by {-20 * np.log10(scale):.1f} dB: its peak was {highest:.2f} of full scale"
        return None
