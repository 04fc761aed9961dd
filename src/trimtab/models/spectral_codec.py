"""A codec that needs no download: log-mel frames, residual codebooks learned from the clips at hand, and Griffin-Lim.

It speaks the interface of transformers' HiggsAudioV2TokenizerModel: 24 kHz, 25 code frames a second, 8 codebooks of
1024. It is no neural codec, knows no sound but what it learned from, and carries no phase. Saved and loaded as
transformers' models are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter, functional
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedAudioTokenizerBase
from transformers.utils import ModelOutput

from trimtab.models.kmeans import nearest, residual_codebooks
from trimtab.models.spectral_frames import Frames


class SpectralCodecConfig(PreTrainedConfig):
    """What a spectral codec is made of, beside what it learned."""

    model_type = "trimtab_spectral_codec"

    sample_rate: int = 24000
    hop_length: int = 960
    """Samples that one code frame stands for: 40 ms."""
    num_quantizers: int = 8
    codebook_size: int = 1024
    """Codes lie below this; a codebook that was learned from little has fewer entries, and the rest stays unused."""
    parts: int = 4
    """Short frames in one code frame."""
    window: int = 1024
    bands: int = 100
    floor: float = 1e-4
    """Magnitude, of a full-scale sine's 1, below which a band counts as silent."""
    components: int = 128
    """Numbers that a code frame's spectrum is told by, along the directions in which the learned clips vary most."""
    phase_rounds: int = 60
    phase_momentum: float = 0.99

    def check(self) -> None:
        """ValueError where a number is none that a codec of this kind was ever made with."""
        for name, most in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {str(value)[:100]!r}, not a whole number from 1 to {most:,}")
        if type(self.floor) not in (int, float) or not 0 < self.floor < 1:
            raise ValueError(f"floor is {str(self.floor)[:100]!r}, not a number between 0 and 1")

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop_length


_MOST = {
    "sample_rate": 384_000,
    "hop_length": 1 << 16,
    "num_quantizers": 256,
    "codebook_size": 1 << 20,
    "parts": 64,
    "window": 1 << 14,
    "bands": 1 << 10,
    "components": 1 << 12,
    "phase_rounds": 10_000,
}


@dataclass
class SpectralCodecEncoded(ModelOutput):
    audio_codes: Tensor | None = None


@dataclass
class SpectralCodecDecoded(ModelOutput):
    audio_values: Tensor | None = None


@dataclass
class SpectralCodecOutput(ModelOutput):
    audio_codes: Tensor | None = None
    audio_values: Tensor | None = None


class SpectralCodec(PreTrainedAudioTokenizerBase):
    """Sound to codes and back; `learn` makes one."""

    config: SpectralCodecConfig
    config_class = SpectralCodecConfig
    base_model_prefix = "spectral_codec"
    main_input_name = "input_values"
    input_modalities = "audio"

    entries: Tensor

    def __init__(self, config: SpectralCodecConfig) -> None:
        config.check()
        super().__init__(config)
        self._frames = Frames(
            config.sample_rate, config.hop_length // config.parts, config.window, config.bands
        )
        width = config.parts * config.bands
        self.basis = Parameter(torch.zeros(config.components, width), requires_grad=False)
        self.codebooks = Parameter(
            torch.zeros(config.num_quantizers, config.codebook_size, config.components), requires_grad=False
        )
        self.register_buffer("entries", torch.ones(config.num_quantizers, dtype=torch.long))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Nothing is drawn at random: a codec that was not learned knows silence alone."""

    @classmethod
    def learn(
        cls,
        sounds: Sequence[Any],
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        rounds: int = 8,
        most_vectors: int = 24_000,
        told: Callable[[int], None] = lambda book: None,
        **settings: Any,
    ) -> SpectralCodec:
        """A codec for clips like these: one-dimensional arrays at the codec's rate.

        Code frames are taken at many more places than the grid's, so that the codebooks do not depend on where a clip
        begins; from long material as many are drawn as `most_vectors`.
        """
        codec = cls(SpectralCodecConfig(**settings))
        cast(Module, codec).to(device).eval()
        generator = torch.Generator().manual_seed(seed)
        with codec._in_full_precision():
            vectors = codec._many_vectors(sounds, most_vectors, generator)
            codec._learn_basis(vectors)
            found = residual_codebooks(
                vectors @ codec.basis.T,
                codec.config.num_quantizers,
                codec.config.codebook_size,
                EACH,
                rounds,
                generator,
                told,
            )
            for book, entries in enumerate(found):
                codec.codebooks[book, : len(entries)] = entries
                codec.entries[book] = len(entries)
        return codec

    def encode(self, input_values: Tensor, return_dict: bool | None = None) -> SpectralCodecEncoded | Tensor:
        """(batch, 1, samples) to codes (batch, codebooks, frames); the last frame is filled up with silence."""
        if input_values.ndim != 3 or input_values.shape[1] != 1 or not input_values.shape[2]:
            raise ValueError(
                f"sound must have the shape (batch, 1, samples), not {tuple(input_values.shape)}"
            )
        with self._in_full_precision():
            sound = input_values[:, 0].to(self.codebooks)
            sound = functional.pad(sound, (0, -sound.shape[-1] % self.config.hop_length))
            vectors = self._vectors(sound, self.config.parts) @ self.basis.T
            left = vectors.flatten(0, 1)
            codes = []
            for book, count in zip(self.codebooks, self.entries.tolist(), strict=True):
                codes.append(nearest(left, book[:count]))
                left = left - book[codes[-1]]
            audio_codes = torch.stack(codes).view(len(codes), *vectors.shape[:2]).transpose(0, 1)
        return SpectralCodecEncoded(audio_codes) if self._as_output(return_dict) else audio_codes

    def decode(self, audio_codes: Tensor, return_dict: bool | None = None) -> SpectralCodecDecoded | Tensor:
        """Codes (batch, codebooks, frames), the first codebooks or all, to sound (batch, 1, frames * hop_length)."""
        books, size = audio_codes.shape[1], self.config.codebook_size
        if not audio_codes.numel():
            raise ValueError(f"codes of shape {tuple(audio_codes.shape)} hold no frame")
        if not 0 <= int(audio_codes.min()) <= int(audio_codes.max()) < size:
            raise ValueError(f"codes must lie from 0 to {size - 1}; others mark a stream's ends")
        with self._in_full_precision():
            vectors = cast(Tensor, sum(self.codebooks[book][audio_codes[:, book]] for book in range(books)))
            audio_values = self._sound(vectors @ self.basis)[:, None]
        return SpectralCodecDecoded(audio_values) if self._as_output(return_dict) else audio_values

    def forward(
        self, input_values: Tensor, audio_codes: Tensor | None = None, return_dict: bool | None = None
    ) -> SpectralCodecOutput | tuple[Tensor, Tensor]:
        """The round trip, cut to the length of what came in."""
        if audio_codes is None:
            audio_codes = cast(Tensor, self.encode(input_values, return_dict=False))
        audio_values = cast(Tensor, self.decode(audio_codes, return_dict=False))[
            ..., : input_values.shape[-1]
        ]
        both = audio_codes, audio_values
        return SpectralCodecOutput(*both) if self._as_output(return_dict) else both

    @contextmanager
    def _in_full_precision(self) -> Iterator[None]:
        """Codes and sound are the same wherever they are asked for, also where a model computes in half precision."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def _as_output(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)

    def _vectors(self, sound: Tensor, every: int) -> Tensor:
        """(batch, samples) to (batch, code frames, parts * bands): levels above the floor, zero where it is silent.

        `every` so many short frames a code frame begins.
        """
        config = self.config
        levels = (self._frames.bands(self._frames.magnitudes(sound)) / config.floor).log1p()
        return levels.unfold(1, config.parts, every).transpose(2, 3).flatten(2)

    def _sound(self, vectors: Tensor) -> Tensor:
        config = self.config
        levels = vectors.view(len(vectors), -1, config.bands).clamp(0, math.log1p(LOUDEST / config.floor))
        magnitudes = self._frames.from_bands(levels.expm1() * config.floor)
        return self._frames.sound(magnitudes, config.phase_rounds, config.phase_momentum)

    def _many_vectors(self, sounds: Sequence[Any], most: int, generator: torch.Generator) -> Tensor:
        """Code frames that begin at every short frame, each clip at several offsets, and at most so many."""
        config = self.config
        hop = config.hop_length // config.parts
        places = max(1, sum(len(sound) for sound in sounds) // hop)
        offsets = min(OFFSETS, -(-most // places))
        share = most / (places * offsets)
        taken = []
        for sound in sounds:
            clip = torch.as_tensor(sound, dtype=torch.float32).to(self.codebooks.device)
            for offset in range(offsets):
                shifted = functional.pad(clip[None], (offset * hop // offsets, config.hop_length))
                vectors = self._vectors(shifted, every=1)[0]
                if share < 1:
                    keep = torch.rand(len(vectors), generator=generator) < share
                    vectors = vectors[keep.to(vectors.device)]
                taken.append(vectors)
        return torch.cat(taken)

    def _learn_basis(self, vectors: Tensor) -> None:
        """Directions of greatest power about zero, which is silence, and must stay where it is."""
        power = torch.zeros(vectors.shape[1], vectors.shape[1], dtype=torch.float64)
        for chunk in vectors.split(8192):
            exact = chunk.double().cpu()
            power += exact.T @ exact
        directions = torch.linalg.eigh(power).eigenvectors.flip(1)[:, : self.config.components]
        self.basis.copy_(directions.T)


OFFSETS = 4
"""Places within a short frame at which the clips are cut for learning."""
EACH = 16
"""Code frames for each entry that is learned. They overlap: it is one for every 40 ms of a little sound."""
LOUDEST = 4.0
"""The largest magnitude that is decoded, of a full-scale sine's 1: codes that no sound led to may add up to any."""
