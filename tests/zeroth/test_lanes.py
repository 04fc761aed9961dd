"""Passes with changed weights: any module, any number of lanes, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zeroth_helpers import added, batch, bits, rounding, same_weights, tiny, trainable, with_lora

from trimtab.errors import RequestError
from trimtab.zeroth import ZerothOrder, ZerothSettings
from trimtab.zeroth import lanes as lanes_module
from trimtab.zeroth import noise as noise_module
from trimtab.zeroth.lanes import LaneModules
from trimtab.zeroth.noise import Stream, noise
from trimtab.zeroth.objective import candidate_scores
from trimtab.zeroth.parameters import tuned_parameters
from trimtab.zeroth.sweep import Directions, Sweep

DIRECTIONS = Directions(7, 3, "normal", (0, 0, 4, 5), (0.125, -0.125, 0.0, 0.3))


def modules_of(model: nn.Module) -> LaneModules:
    tuned = tuned_parameters(model)
    return LaneModules(model, tuned, Sweep(tuned))


def moved(model: nn.Module, lane: int) -> nn.Module:
    """A copy of the model with the lane's weights written into it."""
    other = copy.deepcopy(model)
    for i, p in enumerate(trainable(other)):
        z = noise(Stream(7, 3, i, DIRECTIONS.queries[lane]), p.shape)
        p.data = added(p.data, DIRECTIONS.coefficients[lane], z)
    return other.requires_grad_(False)  # as a pass's scratch, by which torch chooses how to multiply a batch


def check_lanes(
    model: nn.Module,
    forward: Callable[[nn.Module, int], Tensor],
    stacked_within: float = 0.0,
    within: float = 0.0,
) -> None:
    """Stacked and one by one, each lane is what a model with that lane's weights gives.

    Bit for bit where every product has the shape that it has in that model; else within a share of the largest value.
    """
    lanes = len(DIRECTIONS.queries)
    modules = modules_of(model)
    with torch.inference_mode():
        wanted = [forward(moved(model, lane), 1) for lane in range(lanes)]
        one_by_one = []
        for lane in range(lanes):
            with modules.running(DIRECTIONS, [lane]):
                one_by_one.append(forward(model, 1))
        with modules.running(DIRECTIONS, range(lanes)):
            stacked = forward(model, lanes).chunk(lanes)
    for alone, got, want in zip(one_by_one, stacked, wanted, strict=True):
        largest = want.abs().amax().item()
        torch.testing.assert_close(alone, want, rtol=0, atol=within * largest)
        torch.testing.assert_close(got, want, rtol=0, atol=stacked_within * largest)
    assert not torch.equal(wanted[0], wanted[2])
    assert modules.called == {unit.name for unit in modules.units}


def scores(data: Any) -> Callable[[nn.Module, int], Tensor]:
    return lambda model, lanes: candidate_scores(model, data, lanes)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt", "gpt_neox", "bert", "qwen3_moe"])
def test_architectures(kind: str) -> None:
    """OPT has a look-up with a forward of its own, GPT-2 its Conv1D, the mixture three-dimensional experts."""
    check_lanes(tiny(kind), scores(batch(0)), stacked_within=rounding())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_adapters(kind: str) -> None:
    check_lanes(with_lora(tiny(kind)), scores(batch(0)), stacked_within=rounding())


def test_an_adapter_on_the_embedding() -> None:
    """Its tensors lie in a ParameterDict, which has no forward."""
    model = with_lora(tiny("llama"), ["embed_tokens", "q_proj"])
    assert any("lora_embedding_A" in t.name for t in tuned_parameters(model))
    for name, p in model.named_parameters():
        if "lora_embedding" in name:
            p.data.normal_(std=0.1)
    check_lanes(model, scores(batch(0)), stacked_within=rounding())


def test_dora() -> None:
    """It takes norms of the whole adapted weight, for which it asks its adapter about an identity matrix."""
    model = with_lora(tiny("llama"), ["q_proj", "down_proj"], use_dora=True)
    assert sum("lora_magnitude_vector" in t.name for t in tuned_parameters(model)) == 4
    check_lanes(model, scores(batch(0)), stacked_within=rounding())


class Mixed(nn.Module):
    """Owns a matrix and a scale, a list of vectors, and children of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(()))
        self.vectors = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.named = nn.ParameterDict({"shift": torch.randn(6)})
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6)])
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.convolution = nn.Conv1d(5, 5, 3, padding=1)
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self.bare = nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.only_bias = nn.Linear(6, 6)
        self.only_bias.weight.requires_grad_(False)

    def forward(self, x: Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
        x = x @ self.matrix * self.scale + self.vectors[0] + self.vectors[1] * self.named["shift"]
        x = x + extra["bias"][0] + extra["same"]
        for layer in self.layers:
            x = layer(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.only_bias(self.frozen(self.convolution(self.encoder(x))))
        x = self.recurrent(x)[0] + self.bare(x)
        return {"out": x, "nothing": None, "kind": "mixed"}


def test_modules_of_every_kind() -> None:
    """A parent that owns tensors runs lane by lane, and its children inside it know which lane it is."""
    data, bias = torch.randn(2, 5, 6), torch.randn(2, 1, 6)

    def forward(model: nn.Module, lanes: int) -> Tensor:
        extra = {"bias": (bias.repeat(lanes, 1, 1),), "same": torch.ones(5, 6)}
        made = model(data.repeat(lanes, 1, 1), extra=extra)
        assert (made["nothing"], made["kind"]) == (None, "mixed")
        return made["out"]  # type: ignore[no-any-return]

    check_lanes(Mixed().eval(), forward)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixed()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, extra={"bias": (x[:, :1],), "same": 1.0})["out"]  # type: ignore[no-any-return]


def test_large_modules_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small limit every linear layer goes by rows and every other module lane by lane."""
    monkeypatch.setattr(lanes_module, "_SCRATCH_FLOOR", 40)
    monkeypatch.setattr(lanes_module, "_SCRATCH_SHARE", 1_000_000)
    data = torch.randn(2, 5, 6)
    check_lanes(
        Wrapped().eval(),
        lambda model, lanes: model(data.repeat(lanes, 1, 1)),
        stacked_within=rounding(),
        within=rounding(),
    )
    check_lanes(tiny("llama"), scores(batch(0)), stacked_within=rounding(), within=rounding())


def test_one_dimensional_input_of_a_layer_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_SCRATCH_FLOOR", 8)
    model = nn.Linear(4, 5)
    modules = modules_of(model)
    with torch.inference_mode(), modules.running(DIRECTIONS, [0]):
        got = model(torch.ones(4))
    torch.testing.assert_close(got, moved(model, 0)(torch.ones(4)))


def test_a_tied_tensor_has_one_noise() -> None:
    model = tiny("llama")
    names = [t.name for t in tuned_parameters(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    units = {unit.name: unit for unit in modules_of(model).units}
    embed, head = units["model.embed_tokens"], units["lm_head"]
    assert embed.slots[0][2].index == head.slots[0][2].index == 0


def test_frozen_modules_run_once_for_all_lanes() -> None:
    model = with_lora(tiny("llama"), ["q_proj"])
    modules, calls = modules_of(model), []
    base = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    hook = base.register_forward_hook(lambda m, a, out: calls.append(out.shape[0]))
    with torch.inference_mode(), modules.running(DIRECTIONS, range(4)):
        candidate_scores(model, batch(0), 4)
    hook.remove()
    assert calls == [4 * batch(0).input_ids.shape[0]]


@pytest.mark.parametrize("lanes", [1, 2])
def test_nothing_is_left_behind_after_an_error(lanes: int) -> None:
    model = with_lora(tiny("qwen3"), ["q_proj", "embed_tokens"])
    model.train()
    state = snapshot(model)
    calls = 0

    def explode(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("in the middle of a forward")

    hooks = [
        m.register_forward_hook(explode) for m in model.modules() if type(m).__name__ == "Qwen3Attention"
    ]
    optimizer = ZerothOrder(model, ZerothSettings(lanes=lanes, eps=0.1, learning_rate=0.1))
    if lanes == 2:
        calls = 1  # both passes share a forward: two layers, the second one fails
    with pytest.raises(KeyError):
        optimizer.step([batch(0)])
    for hook in hooks:
        hook.remove()
    assert_same(state, snapshot(model))
    fresh = with_lora(tiny("qwen3"), ["q_proj", "embed_tokens"])
    for each in (optimizer, ZerothOrder(fresh, optimizer.settings)):
        each.step([batch(0)])
    assert same_weights(model, fresh)


def test_nothing_is_left_behind_after_a_step() -> None:
    model = Wrapped().train()
    state = snapshot(model)
    optimizer = ZerothOrder(
        model,
        ZerothSettings(learning_rate=0, eps=0.1),
        lambda m, b, lanes: m(b.repeat(lanes, 1, 1)).flatten(1).sum(1).view(lanes, -1),
    )
    optimizer.step([torch.randn(3, 5, 6)])
    assert_same(state, snapshot(model))


def snapshot(model: nn.Module) -> Any:
    attributes = {
        name: (
            set(m.__dict__),
            set(m._parameters),
            len(m._forward_pre_hooks),
            m.training,
            m.__dict__.get("forward"),
        )
        for name, m in model.named_modules()
    }
    return attributes, {n: id(p) for n, p in model.named_parameters()}, bits(model)


def assert_same(before: Any, after: Any) -> None:
    assert before[:2] == after[:2]
    assert all(map(torch.equal, before[2], after[2]))


class Shuffled(nn.Module):
    """Gives a layer a number of rows that depends on the data, as old mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[x[:, 0] > 0] = self.layer(x[x[:, 0] > 0])
        return out


def test_what_does_not_split_by_lanes_is_named() -> None:
    model = nn.Sequential(Shuffled())
    data = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [-1.0, 0, 0]])

    def loss(m: nn.Module, b: Tensor, lanes: int) -> Tensor:
        return m(b.repeat(lanes, 1)).sum(1).view(lanes, -1)  # type: ignore[no-any-return]

    stacked = ZerothOrder(model, ZerothSettings(lanes=2), loss)
    with pytest.raises(RequestError, match=r"0\.layer: an input of shape \(4, 3\) .* 2 lanes of 3 rows"):
        stacked.step([data])
    ZerothOrder(model, ZerothSettings(lanes=1), loss).step([data])


class Sneaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.read = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.used(x), self.read.weight)


def test_a_module_that_is_never_called_is_named() -> None:
    with pytest.warns(UserWarning, match=r"1 modules .* took no part in the first step: read\."):
        ZerothOrder(Sneaky(), ZerothSettings(), lambda m, b, n: m(b.repeat(n, 1)).sum(1).view(n, -1)).step(
            [torch.ones(2, 3)]
        )


def test_only_the_rows_looked_up_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    table = nn.Embedding(1000, 8)
    made: list[int] = []
    own = Sweep.row_copies

    def counted(self: Sweep, tuned: Any, change: Any, lanes: Any, rows: Tensor) -> list[Tensor]:
        made.append(rows.numel())
        return own(self, tuned, change, lanes, rows)

    monkeypatch.setattr(Sweep, "row_copies", counted)
    monkeypatch.setattr(Sweep, "copies", None)
    with torch.inference_mode(), modules_of(table).running(DIRECTIONS, [0, 1]):
        got = table(torch.tensor([[5, 999, 5], [7, 5, 5]]))
    assert made == [3]
    plus, minus = (moved(table, lane) for lane in (0, 1))
    assert torch.equal(got[0], plus(torch.tensor([5, 999, 5])))
    assert torch.equal(got[1], minus(torch.tensor([7, 5, 5])))


class Indexed(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Multiplied(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, self.num_embeddings).float() @ self.weight


@pytest.mark.parametrize("kind", [nn.Embedding, Indexed, Multiplied])
def test_a_table_is_perturbed_however_it_is_read(kind: type[nn.Embedding]) -> None:
    ids = torch.tensor([[1, 2], [3, 19]])
    check_lanes(nn.Sequential(kind(20, 8)), lambda model, lanes: model(ids.repeat(lanes, 1)))


class Allocations(TorchDispatchMode):
    """The size of every storage that an operation gives back and that was not there before."""

    def __init__(self, known: nn.Module) -> None:
        super().__init__()
        self.known = {p.untyped_storage().data_ptr() for p in known.parameters()}
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.sizes.add(each.untyped_storage().nbytes())
        return made


def test_no_scratch_is_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary: neither its noise nor its changed weights nor its new ones are ever made as a whole."""
    monkeypatch.setattr(lanes_module, "_SCRATCH_FLOOR", 1 << 15)
    monkeypatch.setattr(noise_module, "_GROUPS_PER_THREAD", 1 << 10)
    monkeypatch.setattr(noise_module, "_MOST_THREADS", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8_000, 64), nn.Linear(64, 64), nn.Linear(64, 8_000, bias=False))
    model.bfloat16()
    for settings in (
        ZerothSettings(learning_rate=1e-3, weight_decay=0.1),
        ZerothSettings(learning_rate=1e-3, method="fzoo", queries=4, lanes=5),
    ):
        optimizer = ZerothOrder(
            model, settings, lambda m, b, lanes: m(b.repeat(lanes)).float().square().mean(1).view(lanes, -1)
        )
        with Allocations(model) as seen:
            optimizer.step([torch.arange(2)])
        vocabulary, logits = 8_000 * 64 * 2, 2 * settings.passes * 8_000 * 4
        assert max(seen.sizes) <= logits < vocabulary / 2
        assert max(seen.sizes - {logits, logits // 2}) <= 2 * (1 << 15)
