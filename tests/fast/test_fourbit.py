"""Adapters over four-bit weights, plain and fused, against the same adapters over the weights unpacked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from trimtab.fast.fourbit import use_fast_fourbit
from trimtab.fast.lora import use_fast_adapters
from trimtab.models.nf4_linear import Nf4Linear
from trimtab.models.nf4_loading import pack_model


def _adapted(model: Any) -> Any:
    torch.manual_seed(5)
    tuned = get_peft_model(
        model.requires_grad_(False),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
    )
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return tuned


def _unpacked(model: Any) -> Any:
    """The model with the weights that its packed layers stand for."""
    plain = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            layer = nn.Linear(module.in_features, module.out_features, bias=False)
            layer.weight.data = module.unpacked(torch.float32)
            plain.set_submodule(name, layer)
    return plain


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_over_the_unpacked_weights(fused: bool, tiny_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    pack_model(base)
    plain, packed = _adapted(_unpacked(base)), _adapted(base)
    assert use_fast_fourbit(packed) == 0  # no GPU here: plain torch unpacks
    if fused:
        assert use_fast_adapters(packed) == 8
    ids = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(6))
    losses = []
    for model in (plain, packed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in packed.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_fused_adapters_switched_off_give_the_packed_model_itself(tiny_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    pack_model(base)
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        before = base(ids).logits
        tuned = _adapted(base)
        use_fast_adapters(tuned)
        assert not torch.equal(tuned(ids).logits, before)
        with tuned.disable_adapter():
            assert torch.equal(tuned(ids).logits, before)
