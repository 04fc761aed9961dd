"""Architectures of well-known models, so that `plan` works for them without a network and without weights.

Only shapes: no weights, no tokenizer. A preset is checked by its published parameter count in the tests.
"""

from __future__ import annotations

from typing import Any

from trimtab.models import tiny_vision, tiny_voice
from trimtab.models.shape_names import HIGGS_AUDIO_3B, SHAPES

_SMOLLM_2 = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192}
_LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048}
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
_QWEN_2 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
_FIGURES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "tie_word_embeddings"),
)


def _shape(family: dict[str, Any], *figures: int, **more: Any) -> dict[str, Any]:
    return {**family, **dict(zip(_FIGURES, figures, strict=True)), **more}


_TINYLLAMA = _shape(_LLAMA_2, 2048, 22, 32, 4, 5632, False)
_LLAMA_1B = _shape(_LLAMA_3, 2048, 16, 32, 8, 8192, True, head_dim=64)
_LLAMA_3B = _shape(_LLAMA_3, 3072, 28, 24, 8, 8192, True, head_dim=128)
_LLAMA_8B = _shape(_LLAMA_3, 4096, 32, 32, 8, 14336, False)
_LLAMA_70B = _shape(_LLAMA_3, 8192, 80, 64, 8, 28672, False)
PRESETS: dict[str, dict[str, Any]] = {
    tiny_vision.NAME: tiny_vision.SHAPE,
    tiny_voice.NAME: tiny_voice.SHAPE,
    "smollm2": _shape(_SMOLLM_2, 576, 30, 9, 3, 1536, True),
    "tinyllama/tinyllama-1.1b-chat-v1.0": _TINYLLAMA,
    "tinyllama/tinyllama-1.1b-intermediate-step-1431k-3t": _TINYLLAMA,
    "qwen/qwen3-0.6b": _shape(_QWEN_3, 1024, 28, 16, 8, 3072, True),
    "qwen/qwen3-1.7b": _shape(_QWEN_3, 2048, 28, 16, 8, 6144, True),
    "qwen/qwen3-4b": _shape(_QWEN_3, 2560, 36, 32, 8, 9728, True),
    "qwen/qwen3-8b": _shape(_QWEN_3, 4096, 36, 32, 8, 12288, False),
    "qwen/qwen3-14b": _shape(_QWEN_3, 5120, 40, 40, 8, 17408, False),
    "qwen/qwen3-32b": _shape(_QWEN_3, 5120, 64, 64, 8, 25600, False),
    "qwen/qwen2.5-0.5b-instruct": _shape(_QWEN_2, 896, 24, 14, 2, 4864, True),
    "qwen/qwen2.5-1.5b-instruct": _shape(_QWEN_2, 1536, 28, 12, 2, 8960, True),
    "qwen/qwen2.5-7b-instruct": _shape(_QWEN_2, 3584, 28, 28, 4, 18944, False, vocab_size=152064),
    "qwen/qwen2.5-72b-instruct": _shape(_QWEN_2, 8192, 80, 64, 8, 29568, False, vocab_size=152064),
    "meta-llama/llama-3.2-1b": _LLAMA_1B,
    "meta-llama/llama-3.2-1b-instruct": _LLAMA_1B,
    "meta-llama/llama-3.2-3b": _LLAMA_3B,
    "meta-llama/llama-3.2-3b-instruct": _LLAMA_3B,
    "meta-llama/llama-3.1-8b": _LLAMA_8B,
    "meta-llama/llama-3.1-8b-instruct": _LLAMA_8B,
    "meta-llama/llama-3.1-70b": _LLAMA_70B,
    "meta-llama/llama-3.1-70b-instruct": _LLAMA_70B,
    "meta-llama/llama-3.3-70b-instruct": _LLAMA_70B,
    "bosonai/higgs-audio-v2-generation-3b-base": HIGGS_AUDIO_3B,
    "eustlb/higgs-audio-v2-generation-3b-base": HIGGS_AUDIO_3B,
}


def preset_config(name: str) -> Any | None:
    """The transformers config of a known model (by hub id, any case), or None."""
    from transformers import AutoConfig

    shape = PRESETS.get(name.lower()) or SHAPES.get(name.lower())
    return AutoConfig.for_model(**shape) if shape else None
