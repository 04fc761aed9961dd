"""Loads Higgs Audio's own codec, transformers' HiggsAudioV2TokenizerModel, also where torchaudio is not installed.

transformers' file imports torchaudio at its head and takes one function from it, `functional.resample`. Where
torchaudio is missing, that one function is ours, by the same definition. Never changes the class itself.
"""

from __future__ import annotations

import importlib
import math
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FILE = "transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer"
ZEROS = 6
"""Zero crossings of the sinc on each side, and the share of the band that is kept: torchaudio's defaults."""
ROLL_OFF = 0.99


def higgs_codec_class() -> Any:
    """The class, not a stand-in for it."""
    from transformers.utils import is_torchaudio_available

    # Asked before anything is lent: transformers remembers the answer.
    if is_torchaudio_available() or FILE in sys.modules:
        return importlib.import_module(FILE).HiggsAudioV2TokenizerModel
    lent, functions = ModuleType("torchaudio"), ModuleType("torchaudio.functional")
    lent.__spec__ = ModuleSpec("torchaudio", None)
    functions.resample = resample  # type: ignore[attr-defined]
    lent.functional = functions  # type: ignore[attr-defined]
    sys.modules["torchaudio"] = lent
    try:
        return importlib.import_module(FILE).HiggsAudioV2TokenizerModel
    finally:
        # For that file alone: others must not take it for the whole library.
        del sys.modules["torchaudio"]


def resample(waveform: Tensor, orig_freq: int, new_freq: int) -> Tensor:
    """The last axis at the new rate, by a sinc under a Hann window; the length is rounded up."""
    common = math.gcd(orig_freq, new_freq)
    old, new = orig_freq // common, new_freq // common
    if old == new:
        return waveform
    kernels, reach = _kernels(old, new)
    length = waveform.shape[-1]
    sound = functional.pad(waveform.reshape(-1, 1, length), (reach, reach + old))
    # Each block of `old` samples gives `new`, one kernel for each of the places between the old ones.
    found = functional.conv1d(sound, kernels.to(sound), stride=old)
    found = found.transpose(1, 2).reshape(*waveform.shape[:-1], -1)
    return found[..., : -(-new * length // old)]


@lru_cache(maxsize=8)
def _kernels(old: int, new: int) -> tuple[Tensor, int]:
    """(new, 1, taps) and how far they reach before a block's first sample."""
    band = min(old, new) * ROLL_OFF
    reach = math.ceil(ZEROS * old / band)
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    taken = torch.arange(-reach, reach + old, **exact) / old
    made = torch.arange(new, **exact) / new
    crossings = ((taken - made[:, None]) * band).clamp(-ZEROS, ZEROS)
    window = torch.cos(crossings * math.pi / ZEROS / 2).square()
    return (torch.sinc(crossings) * window * (band / old)).float()[:, None], reach
