"""Models for recipes that split."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def four_layers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a layer for each of four GPUs."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "four-layers"
    config = LlamaConfig.from_pretrained(tiny_model, num_hidden_layers=4)
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder
