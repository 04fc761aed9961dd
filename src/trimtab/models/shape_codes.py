"""Codes in a rehearsal of shapes: of each clip as many as a codec gives, all alike. Nothing is encoded, nothing kept.

A model of which only the shape is known has no codec either. What a rehearsal of shapes tells (memory, devices, what
fits) hangs on how many codes there are, not on which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from trimtab.data.clips import Clip


@dataclass(frozen=True)
class ShapeCodec:
    """What is known of a codec without having one."""

    sample_rate: int
    hop: int
    """Samples that one frame of codes stands for."""
    codebooks: int

    @classmethod
    def of(cls, model_config: Any) -> ShapeCodec:
        """As fast as Higgs Audio's own codec, which the spectral one follows: 25 frames of each second."""
        from trimtab.models.spectral_codec import SpectralCodecConfig

        like = SpectralCodecConfig()
        return cls(like.sample_rate, like.hop_length, model_config.num_codebooks)

    def codes(self, clip: Clip) -> Tensor:
        """(frames, codebooks), each the first entry of its codebook."""
        import torch

        frames = -(-len(clip.sound(self.sample_rate)) // self.hop)
        return torch.zeros(frames, self.codebooks, dtype=torch.long)
