"""On a real GPU: fused adapters, Triton's MLP and compiled layers together, against PEFT's own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.fast.apply import make_fast
from trimtab.hardware import probe
from trimtab.placement import PlacementRequest, profile_model, resolve
from trimtab.placement.speed import SpeedRequest

pytestmark = [
    pytest.mark.gpu(needs="kernels as Triton compiles them, and graphs of layers"),
    pytest.mark.skipif(
        not probe().gpus or probe().triton is None, reason="there is no CUDA device with triton here"
    ),
]


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(shape).to("cuda", torch.bfloat16)
    tuned: Any = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear")).train()
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return tuned


def gradients(model: Any, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    for length in lengths:
        torch.manual_seed(length)
        ids = torch.randint(0, 1000, (2, length), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("budget", [None, 0.4])
def test_all_parts_together_give_peft_s_gradients(budget: float | None) -> None:
    model, said = adapted(), []
    plain = copy.deepcopy(model)
    asked = SpeedRequest(compile=True, kernels="triton", activation_memory_budget=budget)
    plan = resolve(PlacementRequest(device="cuda:0"), probe(), profile_model(model), speed=asked)
    made = make_fast(model, plan, said.append)
    assert made.counts == {"adapters": 28, "kernels": 4}
    ours, theirs = gradients(model, (64, 200, 96)), gradients(plain, (64, 200, 96))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(mine, other, dim=0) > 0.99
        assert (mine - other).norm() < 0.1 * other.norm()
    assert made.blocks is not None
    assert not made.blocks.plain, said
    assert made.blocks.graphs == 1, "one graph for any length"
