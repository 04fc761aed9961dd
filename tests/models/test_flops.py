"""The operations that a model needs, held against those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.gpu_models import MODELS, peak_flops
from trimtab.models.flops import ModelFlops, flops_of


def model(layers: int = 6) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=96, num_hidden_layers=layers, **shape)
    config._attn_implementation = "eager"  # whose products are counted one by one
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tuned", ["all", "adapters"])
def test_forward_and_backward_are_those_that_torch_counts(tuned: str) -> None:
    built = model()
    if tuned == "adapters":
        built = get_peft_model(built, LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.randint(0, 96, (2, 40))
    with FlopCounterMode(display=False) as counted:
        built(input_ids=ids, labels=ids).loss.backward()
    ours = flops_of(built)
    # Eager attention computes the whole square, of which a token sees half; and 40 places of the head.
    square = ours.of([40, 40], 80) + ours.pair * 6 * 2 * (40 * 40 - 40 * 41 // 2)
    # No gradient goes back into the embeddings of a frozen first layer.
    assert square == pytest.approx(counted.get_total_flops(), rel=0.04 if tuned == "adapters" else 1e-6)


def test_rows_count_by_their_own_lengths() -> None:
    ours = ModelFlops(token=10.0, place=5.0, pair=1.0, windows=(None, 4))
    assert ours.of([3, 6], 7) == 10 * 9 + 5 * 7 + (6 + 21) + (6 + 10 + 2 * 4)


def test_peaks_are_of_known_models_alone() -> None:
    assert peak_flops("NVIDIA H200") == pytest.approx(989.4e12)
    assert peak_flops("NVIDIA H2000") is None
    assert all(10 < model.half_tflops < 3000 for model in MODELS)
