"""Frozen weights as a processor reads them best: the same numbers, of the weight as it is now."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from trimtab.fast.head import Head, head_loss
from trimtab.fast.lora import FastLinear, use_fast_adapters
from trimtab.fast.reordered import Reordered, usable, use_reordered

pytestmark = pytest.mark.skipif(not usable(), reason="this torch or processor has no such product")


def adapted() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    settings = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(transformers.LlamaForCausalLM(config), settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    use_fast_adapters(model)
    return model.train()


def logits_of(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(22).reshape(2, 11) * 13 % 97, use_cache=False).logits
    return found


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = logits_of(model)
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FastLinear)]


def orders(model: nn.Module) -> list[Reordered]:
    return [m.__dict__["reordered"] for m in model.modules() if "reordered" in m.__dict__]


def test_logits_and_gradients_are_the_same() -> None:
    model, other = adapted(), adapted()
    assert use_reordered(model, room=1e9) == len(layers(model)) + 1  # and the head
    for made, due in zip(step(model), step(other), strict=True):
        torch.testing.assert_close(made, due, rtol=1e-4, atol=1e-6)
    assert all(set(layer.reordered._made) == {False, True} for layer in layers(model))


def test_a_weight_that_was_changed_is_read_anew() -> None:
    kept, x, weight = Reordered(), torch.randn(7, 48), torch.randn(32, 48)
    kept.product(x, weight)
    weight.mul_(2)
    torch.testing.assert_close(kept.product(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)
    other = torch.randn(32, 48)
    torch.testing.assert_close(kept.product(x, other), x @ other.T, rtol=1e-4, atol=1e-4)


def test_what_peft_merges_into_a_weight_is_not_missed() -> None:
    model = adapted()
    use_reordered(model, room=1e9)
    before, _ = step(model)
    model.merge_adapter()
    logits_of(model)
    for layer in layers(model):
        layer.base_layer.weight.data.zero_()  # unnoticed by torch's count of versions
        layer.merged_adapters = []
    other = adapted()
    for layer in layers(other):
        layer.base_layer.weight.data.zero_()
    made, due = step(model)[0], step(other)[0]
    torch.testing.assert_close(made, due, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(made, before)


def test_no_copy_is_kept_where_there_is_no_room() -> None:
    model = adapted()
    needed = sum(layer.base_layer.weight.nbytes for layer in layers(model)) + 97 * 32 * 4
    assert use_reordered(model, room=needed - 1) == 0
    assert not orders(model)
    assert use_reordered(model, room=needed) > 0


def test_copies_and_pickles_of_a_model_hold_none() -> None:
    model = adapted()
    use_reordered(model, room=1e9)
    step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert orders(other)
        assert not any(order._made for order in orders(other))
        torch.testing.assert_close(step(other), step(model))


@pytest.mark.parametrize("biased", [False, True])
def test_the_loss_of_a_head_is_the_same(biased: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 32, requires_grad=True), torch.randn(97, 32)
    bias = torch.randn(97) if biased else None
    labels = torch.arange(9) * 7
    found = []
    for head in (Head(weight, bias), Head(weight, bias, reordered=Reordered())):
        told = head_loss(hidden, head, labels)
        (slope,) = torch.autograd.grad(told.loss, hidden)
        found.append((told.loss.detach(), told.entropy, slope))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_half_precision_and_other_formats_take_the_plain_product() -> None:
    kept = Reordered()
    for format in (torch.float64, torch.bfloat16):
        x, weight = torch.randn(3, 16, dtype=format), torch.randn(8, 16, dtype=format)
        torch.testing.assert_close(kept.product(x, weight), x @ weight.T)
        torch.testing.assert_close(kept.back(x @ weight.T, weight), (x @ weight.T) @ weight)
    assert not kept._made
