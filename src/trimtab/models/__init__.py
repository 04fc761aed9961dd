"""Run: loading models and tokenizers, presets, adapters. Never chooses a device."""

from trimtab.models.load import load_model, load_model_config, load_skeleton, load_tokenizer, model_source

__all__ = ["load_model", "load_model_config", "load_skeleton", "load_tokenizer", "model_source"]
