"""Layers compiled one by one: the same numbers, one graph for all, plain where they are not trained or cannot be."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_models import TEXT
from trimtab.fast.blocks import NotCompiled, compile_blocks
from trimtab.placement.witness import Witness
from trimtab.virtual import virtual_gpus


def adapted(kind: str = "llama", *, dropout: float = 0.0, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = TEXT | {"num_hidden_layers": 3} | more
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def layers_of(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = model.get_base_model().model.layers
    return found


def loss(model: Any, length: int, rows: int = 2, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    ids = torch.randint(0, TEXT["vocab_size"], (rows, length))
    found: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return found


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_the_layers_share_one_graph_and_compute_the_same() -> None:
    model, said = adapted(), []
    plain, names = copy.deepcopy(model), list(model.state_dict())
    blocks = compile_blocks(model, dynamic=True, say=said.append, _backend="eager")
    for length, rows in ((12, 2), (30, 3), (7, 2)):
        ours, theirs = loss(model, length, rows), loss(plain, length, rows)
        assert torch.equal(ours, theirs)
        ours.backward(), theirs.backward()
        for mine, other in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(mine, other)
    assert (blocks.layers, blocks.graphs) == (3, 1)
    assert [line.split(" in ")[0] for line in said] == ["compiled 3 layers as 1 graph"]
    assert list(model.state_dict()) == names

    # Nothing is compiled for what is not trained.
    with torch.no_grad():
        loss(model, 9, rows=1)
    model.eval()
    loss(model, 11, rows=1)
    model.generate(input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, pad_token_id=0)
    assert blocks.graphs == 1

    # Copies are plain, and stand on their own.
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(layer.forward.__self__ is layer for layer in layers_of(twin))
        assert torch.equal(loss(twin, 12), loss(model, 12))


def test_a_length_that_is_another_size_of_the_model_too_needs_no_graph_of_its_own() -> None:
    model = adapted()
    blocks = compile_blocks(model, dynamic=True, _backend="eager")
    shape = model.get_base_model().config
    for length in (shape.hidden_size // shape.num_attention_heads, 23, shape.hidden_size):
        loss(model, length).backward()
    assert blocks.graphs == 1


def test_a_witness_looks_at_a_compiled_layer_from_outside() -> None:
    model = adapted()
    compile_blocks(model, _backend="eager")
    witness = Witness(model.get_base_model())
    inside = "model.layers.1.mlp.up_proj"
    assert witness.closed_around(inside) == "model.layers.1"
    assert not any(module._forward_hooks for module in layers_of(model)[1].mlp.modules())
    assert layers_of(model)[1]._forward_hooks
    witness.remove()


def test_an_inquest_sees_every_module_of_a_compiled_layer() -> None:
    """As monitor/blame.py runs a bad pass again: under hooks, with the compiler told to stand aside."""
    model, seen = adapted(), []
    blocks = compile_blocks(model, demanded=True, _backend="eager")
    part = layers_of(model)[1].mlp.down_proj
    part.register_forward_hook(lambda module, args, output: seen.append(output.isnan().any().item()))
    with torch.compiler.set_stance("force_eager"):
        loss(model, 12).backward()
    assert seen == [False]
    assert blocks.graphs == 0


class Odd(nn.Module):
    """A layer whose next step depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return x if x.sum().item() > 0 else x + self.mlp(x)


class Even(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attention(x))


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Odd(), Odd()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_that_cannot_be_compiled_goes_on_plainly() -> None:
    torch.manual_seed(0)
    model, said = OddModel(), []
    x = torch.randn(2, 8)
    expected = model(x)
    blocks = compile_blocks(model, say=said.append, _backend="eager")
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    assert len(said) == 1
    assert said[0].startswith("2 layers (Odd) are computed plainly, not compiled: ")
    assert blocks.compiled == 0
    assert blocks.as_dict()["plain"]

    demanded = OddModel()
    compile_blocks(demanded, demanded=True, _backend="eager")
    with pytest.raises(NotCompiled, match=r"speed\.compile=true, and Odd cannot"):
        demanded(x)


class Seeing(nn.Module):
    """A tower, of whose layers some have adapters and others not, beside a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.language = OddModel(), OddModel()
        self.tower.layers.append(Odd())
        self.tower.layers[0].mlp.append(nn.Identity())
        for layer in self.language.layers:
            layer.__class__ = Even
        self.language.embeddings = nn.Embedding(4, 8)

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.language.embeddings
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.language(self.tower(x))
        return out


def test_layers_of_a_tower_that_go_on_plainly_are_told_in_one_line() -> None:
    model, said = Seeing(), []
    blocks = compile_blocks(model, say=said.append, _backend="eager")
    model(torch.randn(2, 8))
    assert [line.split(", not")[0] for line in said] == ["3 layers (Odd) are computed plainly"]
    assert len(blocks.plain) == 2
    assert blocks.compiled == 2


@pytest.mark.parametrize("shapes", [False, True])
def test_on_virtual_gpus_nothing_is_compiled_and_that_is_told_once(shapes: bool) -> None:
    said: list[str] = []
    with virtual_gpus(1, shapes=shapes):
        model = OddModel().cuda()
        for layer in model.layers:
            layer.__class__ = Even
        blocks = compile_blocks(model, dynamic=True, say=said.append)
        for rows in (2, 3, 4, 5):
            model(torch.randn(rows, 8, device="cuda")).sum().backward()
    assert said == ["2 layers count as compiled ones: nothing is compiled on virtual GPUs"]
    assert blocks.as_dict() == {"layers": 2}


def test_a_backward_that_does_not_compile_is_met_before_it_runs() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    refusing = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=refuse)
    torch._dynamo.register_backend(refusing, name="refuses_backward")
    model, said = OddModel(), []
    for layer in model.layers:
        layer.__class__ = Even
    blocks = compile_blocks(model, say=said.append, _backend="refuses_backward")
    model(torch.randn(2, 8)).sum().backward()
    assert "2 layers (Even) are computed plainly" in said[0]
    assert "no such kernel" in said[0]
    assert blocks.compiled == 0
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_without_layers_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert compile_blocks(model, _backend="eager").layers == 0
    assert "forward" not in vars(model[0])


@pytest.mark.slow
def test_checkpointing_and_dropout_stay_outside_and_exact() -> None:
    model = adapted(dropout=0.2)
    blocks = compile_blocks(model, dynamic=True, _backend="aot_eager")
    loss(model, 12).backward()
    kept = [gradient.clone() for gradient in gradients(model)]
    for again in (False, True):
        model.zero_grad()
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss(model, 12).backward()
        for mine, other in zip(gradients(model), kept, strict=True):
            torch.testing.assert_close(mine, other)
    assert not blocks.plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3", "mixtral", "gpt_oss", "olmo2", "phi3", "cohere2"])
def test_other_architectures_compile_or_say_why_not(kind: str) -> None:
    more: dict[str, Any] = {"head_dim": 8} if kind != "phi3" else {}
    if kind in ("mixtral", "gpt_oss"):
        more |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "phi3":
        more |= {"pad_token_id": 0}
    model, said = adapted(kind, **more), []
    plain = copy.deepcopy(model)
    blocks = compile_blocks(model, dynamic=True, say=said.append, _backend="aot_eager")
    for length in (12, 30):
        ours, theirs = loss(model, length), loss(plain, length)
        torch.testing.assert_close(ours, theirs)
        ours.backward(), theirs.backward()
        for mine, other in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert said
    assert blocks.graphs <= 4


@pytest.mark.slow
def test_the_real_compiler_and_its_memory_budget() -> None:
    for budget in (None, 0.3):
        model = adapted()
        plain = copy.deepcopy(model)
        blocks = compile_blocks(model, dynamic=None, budget=budget)
        loss(model, 16).backward()
        loss(plain, 16).backward()
        for mine, other in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        assert blocks.compiled == 3
        assert blocks.as_dict()["graphs"] == 1
