"""Adapters in the activations' format, q, k and v as one product, the head in chunks: the numbers of plain PEFT."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from trimtab.fast import head as head_module
from trimtab.fast.head import Head, head_loss
from trimtab.fast.lora import FastLinear, use_fast_adapters
from trimtab.fast.products import onto
from trimtab.fast.siblings import use_joint_products

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.arange(22).reshape(2, 11) * 13 % 97


def adapted(*, bias: bool = False, **lora: Any) -> PeftModel:
    """A small model in fp64, whose adapters are not at their start."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attention_bias=bias)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | lora
    model = get_peft_model(
        transformers.LlamaForCausalLM(config).double(), LoraConfig(**settings, task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
            parameter.data = parameter.data.double()
    return model.train()


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients, with the random numbers of dropout the same each time."""
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(input_ids=TOKENS, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(model: nn.Module, other: nn.Module) -> None:
    logits, slopes = step(model)
    others, other_slopes = step(other)
    torch.testing.assert_close(logits, others)
    assert slopes.keys() == other_slopes.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, other_slopes[name], msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"bias": True},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_dropout": 0.3},
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"rank_pattern": {"k_proj": 2}},
    ],
    ids=["plain", "biases", "rslora", "dora", "dropout", "some layers", "ranks"],
)
def test_adapters_give_the_numbers_of_peft(lora: dict[str, Any]) -> None:
    plain = adapted(**lora)
    fast = copy.deepcopy(plain)
    assert use_fast_adapters(fast) == sum(isinstance(m, FastLinear) for m in fast.modules()) > 0
    same(plain, fast)
    joined = copy.deepcopy(fast)
    attentions = use_joint_products(joined)
    assert attentions == (0 if "target_modules" in lora or "use_dora" in lora else 3)
    same(plain, joined)


def test_merged_disabled_or_several_adapters_take_the_way_of_peft() -> None:
    plain = adapted()
    fast = copy.deepcopy(plain)
    use_fast_adapters(fast)
    use_joint_products(fast)
    for model in (plain, fast):
        torch.manual_seed(3)
        model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        model.double()

    def agree() -> None:
        with torch.no_grad():
            ours, theirs = (m(input_ids=TOKENS, use_cache=False).logits for m in (fast, plain))
        torch.testing.assert_close(ours, theirs)

    agree()
    with plain.disable_adapter(), fast.disable_adapter():
        agree()
    for model in (plain, fast):
        model.base_model.set_adapter(["default", "other"])
    agree()
    for model in (plain, fast):
        model.set_adapter("default")
        model.merge_adapter()
    agree()


def test_what_is_saved_loads_in_plain_peft(tmp_path: Any) -> None:
    fast = adapted()
    base = copy.deepcopy(fast).unload()
    use_fast_adapters(fast)
    use_joint_products(fast)
    logits, _ = step(fast)
    assert not any("joint" in name for name in fast.state_dict())
    fast.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).double().eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS, use_cache=False).logits, logits)


def test_a_layer_called_with_another_input_computes_for_itself() -> None:
    """An attention across two sequences reads its keys and values from another input than its queries."""
    model = adapted()
    use_fast_adapters(model)
    attention = model.base_model.model.model.layers[0].self_attn
    expected = attention.k_proj(torch.ones(1, 3, 32, dtype=torch.double))
    use_joint_products(model)

    class Across(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.q_proj(hidden_states), self.k_proj(other)

    attention.__class__ = Across
    attention.q_proj.given = attention.k_proj.given = (torch.zeros(1, 3, 32, dtype=torch.double), None)
    _, keys = attention(torch.zeros(1, 3, 32, dtype=torch.double), torch.ones(1, 3, 32, dtype=torch.double))
    torch.testing.assert_close(keys, expected)


def test_all_layers_are_one_graph_for_a_compiler() -> None:
    """What differs from layer to layer must not be what a compiled layer was compiled for."""
    from torch._dynamo.testing import CompileCounterWithBackend

    plain = adapted()
    fast = copy.deepcopy(plain)
    use_fast_adapters(fast)
    use_joint_products(fast)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in fast.base_model.model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=counter, fullgraph=True)
    same(plain, fast)
    # The first layer's input needs no gradient: a graph of its own.
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_a_product_onto_another() -> None:
    x, w, t, b = (torch.randn(shape, dtype=torch.double) for shape in ((5, 7), (7, 3), (5, 2), (2, 3)))
    torch.testing.assert_close(onto(x, w, t, b), x @ w + t @ b)
    assert torch.library.opcheck(torch.ops.trimtab.onto.default, (x, w, t, b))


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_the_head_in_chunks(monkeypatch: pytest.MonkeyPatch, trained: bool, softcap: float | None) -> None:
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", 64 * 53)
    torch.manual_seed(0)
    hidden = torch.randn(3, 50, 16, dtype=torch.double, requires_grad=True)
    weight = torch.randn(53, 16, dtype=torch.double, requires_grad=trained)
    bias = torch.randn(53, dtype=torch.double)
    labels = torch.randint(0, 53, (3, 50))
    labels[:, ::4] = -100

    scores = (hidden @ weight.T + bias) * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    flat, wanted = scores.flatten(0, 1), labels.flatten()
    plain = F.cross_entropy(flat, wanted, ignore_index=-100, reduction="sum") / 40
    plain.backward()
    expected = hidden.grad.clone(), weight.grad.clone() if trained else None
    hidden.grad = weight.grad = None
    logs = flat.log_softmax(-1)
    there = wanted != -100

    made = head_loss(hidden, Head(weight, bias, 0.7, softcap), labels, count=40)
    made.loss.backward()
    torch.testing.assert_close(made.loss, plain)
    torch.testing.assert_close(hidden.grad, expected[0])
    if trained:
        torch.testing.assert_close(weight.grad, expected[1])
    assert made.tokens == there.sum()
    assert made.correct == (flat.argmax(-1) == wanted)[there].sum()
    entropy = -(logs.exp() * logs).sum(-1)[there].sum()
    torch.testing.assert_close(made.entropy.double(), entropy, atol=1e-4, rtol=1e-6)


def test_a_batch_without_labels_hangs_on_the_graph() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    made = head_loss(hidden, Head(torch.randn(9, 8)), torch.full((4,), -100))
    made.loss.backward()
    assert made.loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
