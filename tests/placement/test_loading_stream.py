"""Weights that are loaded inside of another stream, on a virtual GPU: its twin on a real one is in `test_cuda.py`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.config.schema import ModelSettings
from trimtab.hardware import probe
from trimtab.models import load, load_model
from trimtab.placement import PlacementRequest, own_stream, profile_model, resolve

SEGMENT = 20 * 2**20
"""Large blocks come in pieces of so much."""


def room(folder: Path) -> tuple[int, int]:
    """What a model's weights took, and what was reserved for them."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape))
    model.save_pretrained(folder)
    plan = resolve(PlacementRequest(device="cuda:0", precision="fp32"), probe(), profile_model(model))
    with own_stream(plan):
        loaded = load_model(ModelSettings(name=str(folder)), plan)
        took = torch.cuda.memory_allocated()
        assert took >= sum(weight.nbytes for weight in loaded.parameters())
        return took, torch.cuda.memory_reserved()


@pytest.mark.virtual_gpus(1)
def test_they_take_their_room_once(tmp_path: Path) -> None:
    took, reserved = room(tmp_path)
    assert reserved < took + SEGMENT


@pytest.mark.virtual_gpus(1)
def test_on_the_stream_around_they_would_take_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "default_stream", nullcontext)
    took, reserved = room(tmp_path)
    assert reserved > took + 2 * SEGMENT
