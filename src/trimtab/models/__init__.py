"""Run: loading models, tokenizers and processors of each family, presets, adapters. Never chooses a device."""

from trimtab.models.families import AUDIO, CAUSAL_LM, IMAGE_TEXT, Family
from trimtab.models.load import (
    load_model,
    load_model_config,
    load_processor,
    load_skeleton,
    load_tokenizer,
    model_source,
)

__all__ = [
    "AUDIO",
    "CAUSAL_LM",
    "IMAGE_TEXT",
    "Family",
    "load_model",
    "load_model_config",
    "load_processor",
    "load_skeleton",
    "load_tokenizer",
    "model_source",
]
