"""`verify` and `verify_gradients` name what is not where, or not what, the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.config.schema import LoraSettings
from trimtab.models.adapters import add_lora
from trimtab.placement import Check, PlacementFault, PlacementPlan, verify, verify_gradients
from trimtab.placement.verify import is_finite
from trimtab.virtual import virtual_gpus


def plan(**changes: Any) -> PlacementPlan:
    basics: dict[str, Any] = {
        "device": "cpu",
        "precision": "fp32",
        "scaler": False,
        "weight_precision": "fp32",
    }
    return PlacementPlan(**(basics | {"strategy": "single"} | changes))


class Net(nn.Module):
    """Two layers, one of which may be left out of the graph."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))
        self.detached = detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.scale
        return self.second(hidden.detach() if self.detached else hidden).sum()


def details(checks: list[Check]) -> dict[str, str]:
    assert all(check.ok for check in checks)
    return {check.name: check.detail for check in checks}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
        )
    )


def test_a_healthy_model_passes() -> None:
    model = Net()
    model.second.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert details(verify(model, plan(), optimizer)) == {
        "parameters": "4 on cpu",
        "buffers": "1 on cpu",
        "trainable": "20 of 25 parameters (80.00 %)",
        "trainable format": "fp32",
        "optimizer": "holds all 2 trainable tensors",
    }


def test_a_stray_parameter_is_named() -> None:
    model = Net()
    model.second.to("meta")
    with pytest.raises(
        PlacementFault, match=r"2 astray: second\.weight on meta, planned on cpu, second\.bias on"
    ) as e:
        verify(model, plan())
    assert e.value.exit_code == 1


def test_a_stray_buffer_is_named() -> None:
    model = Net()
    model.scale = torch.ones(1, device="meta")
    with pytest.raises(PlacementFault, match="buffers: 1 astray: scale on meta, planned on cpu"):
        verify(model, plan())


def test_all_faults_are_told_at_once() -> None:
    model = Net()
    model.scale = torch.ones(1, device="meta")
    with pytest.raises(PlacementFault) as error:
        verify(model.requires_grad_(False), plan())
    assert "buffers: 1 astray" in str(error.value)
    assert "trainable: no parameter requires a gradient" in str(error.value)


def test_many_strays_are_counted_and_a_few_named() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(5)))
    with pytest.raises(PlacementFault, match=r"10 astray: .* and 5 more"):
        verify(model, plan())


def test_a_split_model_is_held_to_its_map() -> None:
    model = tiny_llama()
    model.model.layers[1].to("meta")
    split = plan(strategy="split", device_map={"model.layers.0": "cpu", "model.layers.1": "meta"})
    assert details(verify(model, split))["parameters"] == "21 on cpu, meta"
    wrong = plan(strategy="split", device_map={"model.layers.0": "meta", "model.layers.1": "cpu"})
    with pytest.raises(
        PlacementFault,
        match=r"18 astray: model\.layers\.0\.self_attn\.q_proj\.weight on cpu, planned on meta",
    ):
        verify(model, wrong)


def test_a_split_model_with_adapters_is_held_to_the_same_map() -> None:
    model = tiny_llama()
    model.model.layers[1].to("meta")
    adapted = add_lora(model, LoraSettings(r=2, targets="attention"))
    split = plan(strategy="split", device_map={"model.layers.0": "cpu", "model.layers.1": "meta"})
    assert details(verify(adapted, split))["trainable"].startswith("448 of ")


def test_a_model_to_be_sharded_is_on_the_cpu() -> None:
    sharded = plan(device="cuda:0", strategy="sharded", processes=2)
    assert details(verify(Net(), sharded))["parameters"] == "4 on cpu"
    with pytest.raises(PlacementFault, match="on meta, planned on cpu"):
        verify(Net().to("meta"), sharded)


def test_cpu_and_cpu_0_are_one_device() -> None:
    assert details(verify(Net(), plan(device="cpu:0")))["parameters"] == "4 on cpu:0"


def test_nothing_to_train() -> None:
    with pytest.raises(PlacementFault, match="no parameter requires a gradient: nothing would be trained"):
        verify(Net().requires_grad_(False), plan())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trainable_weights_in_16_bits_are_named(precision: str, dtype: torch.dtype) -> None:
    model = Net()
    model.second.to(dtype)
    with pytest.raises(
        PlacementFault, match=r"2 trainable tensors in (bf|fp)16, planned in fp32: second\.weight"
    ):
        verify(model, plan(precision=precision, scaler=precision == "fp16"))


def test_frozen_weights_in_16_bits_are_fine() -> None:
    model = Net()
    model.second.to(torch.bfloat16).requires_grad_(False)
    verify(model, plan(precision="bf16", weight_precision="bf16"))


def test_a_trainable_parameter_that_the_optimizer_lacks_is_named() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(
        PlacementFault, match=r"optimizer: lacks 2 trainable tensors: second\.weight, second\.bias"
    ):
        verify(model, plan(), optimizer)


def test_a_parameter_replaced_after_the_optimizer_was_made_is_named() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    with pytest.raises(PlacementFault, match=r"lacks 1 trainable tensors: first\.weight"):
        verify(model, plan(), optimizer)


def test_gradients_arrive() -> None:
    model = Net()
    model(torch.ones(2, 4)).backward()
    assert details(verify_gradients(model)) == {
        "gradients arrive": "all 4 trainable tensors have one",
        "gradients finite": "no NaN or infinity",
    }


def test_a_detached_branch_is_named() -> None:
    model = Net(detached=True)
    model(torch.ones(2, 4)).backward()
    with pytest.raises(
        PlacementFault, match=r"2 of 4 trainable tensors got none: first\.weight, first\.bias"
    ):
        verify_gradients(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_gradient_is_named(value: float) -> None:
    model = Net()
    model(torch.ones(2, 4)).backward()
    assert model.second.bias.grad is not None
    model.second.bias.grad.fill_(value)
    with pytest.raises(PlacementFault, match=r"NaN or infinity in 1: second\.bias"):
        verify_gradients(model)
    assert [check.name for check in verify_gradients(model, finite=False)] == ["gradients arrive"]


def test_a_gradient_too_large_for_its_norm_is_finite() -> None:
    model = Net()
    model(torch.ones(2, 4)).backward()
    assert model.first.weight.grad is not None
    model.first.weight.grad.fill_(1e30)
    assert not model.first.weight.grad.norm().isfinite()
    assert details(verify_gradients(model))["gradients finite"] == "no NaN or infinity"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_is_finite_as_its_values_are(dtype: torch.dtype) -> None:
    largest = torch.full((3, 100), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)
    assert is_finite(largest[:0])
    for bad in ("nan", "inf", "-inf"):
        stray = largest.clone()
        stray[1, 7] = float(bad)
        assert not is_finite(stray)


def test_to_look_at_a_gradient_takes_no_copy_of_it() -> None:
    with virtual_gpus(1, shapes=True):
        gradient = torch.ones(4096, 4096, device="cuda")
        before = torch.cuda.memory_allocated()
        assert is_finite(gradient)
        assert torch.cuda.max_memory_allocated() - before < gradient.nbytes // 16
