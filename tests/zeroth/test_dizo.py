"""DiZO: the projection is the paper's formula, on the tensors that play the chosen roles, and never on none."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from zeroth_helpers import (
    batch,
    bits,
    by_chance,
    close_losses,
    fp32,
    plain_loss,
    reference_mezo,
    same_weights,
    tiny,
    with_lora,
)

from trimtab.errors import RequestError
from trimtab.zeroth import NotFinite, ProjectionResult, ZerothOrder, ZerothSettings, tuned_parameters
from trimtab.zeroth.noise import Stream, noise
from trimtab.zeroth.objective import candidate_scores, example_losses
from trimtab.zeroth.parameters import projected_parameters, role_by_name
from trimtab.zeroth.sweep import PROJECTION

SETTINGS: dict[str, Any] = {
    "method": "dizo",
    "learning_rate": 0.05,
    "eps": 0.01,
    "interval": 2,
    "projection_iterations": 4,
    "projection_step": 3.0,
    "seed": 9,
}


def paper_round(
    model: nn.Module,
    start: nn.Module,
    names: Sequence[str],
    settings: ZerothSettings,
    step: int,
    seeds: list[int],
    seen: Sequence[tuple[float, float]],
) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """The search over gamma as published: norms, gamma from the norm, z clipped to tau / eps_p times the norm.

    But for one thing: z is drawn in units of the norm, where the authors' program draws it in units of the weights.
    Weights are set to theta0 + gamma / norm * (theta - theta0) for every loss, and put back. The search follows the
    losses in `seen`; those that it measured itself are given back.
    """
    s = settings
    now, then = dict(model.named_parameters()), dict(start.named_parameters())
    index = {name: i for i, (name, p) in enumerate(model.named_parameters()) if p.requires_grad}
    index = {name: i for i, name in enumerate(index)}
    theta = {name: now[name].detach().clone() for name in names}
    norm = {name: (theta[name].double() - then[name].double()).norm().item() for name in names}
    gamma, pairs = dict(norm), []

    def put(values: dict[str, float]) -> None:
        for name in names:
            ratio = torch.tensor(fp32(values[name] / norm[name]))
            anchor = then[name].detach().float()
            made = anchor + (theta[name].float() - anchor) * ratio
            now[name].data = made.to(theta[name].dtype)

    for iteration in range(s.projection_iterations):
        z = {}
        for name in names:
            drawn = noise(Stream(s.seed, step, index[name], 1 + iteration), (1,)).item() * norm[name]
            bound = s.projection_clip / s.projection_eps * norm[name]
            z[name] = min(max(drawn, -bound), bound)
        losses = []
        for sign in (1, -1):
            put({name: gamma[name] + sign * s.projection_eps * z[name] for name in names})
            losses.append(plain_loss(model, [batch(seeds[iteration])]))
        g = (seen[iteration][0] - seen[iteration][1]) / (2 * s.projection_eps)
        for name in names:
            low, high = (1 - s.projection_clip) * norm[name], (1 + s.projection_clip) * norm[name]
            gamma[name] = min(max(gamma[name] - s.projection_step * g * z[name], low), high)
        pairs.append((losses[0], losses[1]))
    put(gamma)
    return {name: gamma[name] / norm[name] for name in names}, pairs


def rounds(optimizer: ZerothOrder, steps: int, first: int = 100) -> list[ProjectionResult]:
    """Steps with their projection rounds; the batches of round k start at seed 100 * (k + 1)."""
    made = []
    until = optimizer.step_number + steps
    while optimizer.step_number < until or optimizer.due():
        if not optimizer.due():
            optimizer.step([batch(optimizer.step_number)])
        if optimizer.due():
            seeds = iter(range(first * (len(made) + 1), first * (len(made) + 2)))
            result = optimizer.project(lambda seeds=seeds: [batch(next(seeds))])  # type: ignore[misc]
            assert result is not None
            made.append(result)
    return made


@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_the_search_in_ratios_is_the_papers_in_norms(clip: float) -> None:
    """The same losses within rounding, and ratios equal to the precision of the paper's own division by a norm."""
    model = tiny("qwen3")
    start, settings = copy.deepcopy(model), ZerothSettings(**SETTINGS, projection_clip=clip)
    optimizer = ZerothOrder(model, settings)
    plain = copy.deepcopy(model)
    steps = [optimizer.step([batch(step)]).losses for step in range(2)]
    (result,) = rounds(optimizer, 0)
    options = {"rate": settings.learning_rate, "eps": settings.eps, "seed": settings.seed}
    reference_mezo(plain, lambda step: [batch(step)], 2, **options, seen=steps)
    names = [t.name for t in optimizer.projected]
    ratios, pairs = paper_round(plain, start, names, settings, 1, list(range(100, 104)), result.losses)
    assert result.ratios == pytest.approx(ratios, abs=1e-6)
    assert any(abs(r - 1) > 1e-3 for r in result.ratios.values())
    if clip == 0.05:
        assert {0.95, 1.05} & {round(r, 6) for r in result.ratios.values()}
    assert close_losses(result.losses, pairs)
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_round_is_the_formula_bit_for_bit(dtype: torch.dtype, adapter: bool) -> None:
    """In ratios: alpha from 1, losses at alpha +- eps_p z, clip; then theta0 + alpha (theta - theta0), once."""
    model = tiny("llama", dtype)
    model = with_lora(model) if adapter else model
    start, s = copy.deepcopy(model), ZerothSettings(**SETTINGS)
    optimizer = ZerothOrder(model, s)
    for step in range(2):
        optimizer.step([batch(step)])
    plain = copy.deepcopy(model)
    assert optimizer.due()
    seeds = iter(range(100, 200))
    result = optimizer.project(lambda: [batch(next(seeds))])
    assert result is not None
    assert not optimizer.due()

    tuned = tuned_parameters(plain)
    chosen = [t for t in tuned if any(part in t.name for part in ("q_proj", "v_proj"))]
    assert [t.name for t in chosen] == list(result.ratios)
    anchors = {t.index: a.parameter.detach() for t, a in zip(tuned, tuned_parameters(start), strict=True)}
    theta = {t.index: t.parameter.detach().clone() for t in chosen}
    alpha = {t.index: 1.0 for t in chosen}

    def put(values: dict[int, float]) -> None:
        for t in chosen:
            anchor, ratio = anchors[t.index].float(), torch.tensor(fp32(values[t.index]))
            wide = anchor + (theta[t.index].float() - anchor) * ratio
            t.parameter.data = by_chance(wide, dtype, Stream(s.seed, 1, t.index, PROJECTION))

    for i in range(s.projection_iterations):
        z = {k: noise(Stream(s.seed, 1, k, 1 + i), (1,)).item() for k in alpha}
        z = {k: min(max(v, -2.0), 2.0) for k, v in z.items()}
        losses = []
        for sign in (1, -1):
            put({k: alpha[k] + sign * s.projection_eps * z[k] for k in alpha})
            losses.append(plain_loss(plain, [batch(100 + i)], [t.parameter for t in chosen]))
        assert tuple(losses) == result.losses[i]
        g = (losses[0] - losses[1]) / (2 * s.projection_eps)
        alpha = {k: min(max(alpha[k] - s.projection_step * g * z[k], 0.8), 1.2) for k in alpha}
    put(alpha)
    assert {t.name: fp32(alpha[t.index]) for t in chosen} == result.ratios
    assert same_weights(model, plain)
    assert optimizer.forwards == 2 * 2 + 2 * s.projection_iterations


def test_rounds_come_at_the_interval_and_are_not_forgotten() -> None:
    optimizer = ZerothOrder(tiny("llama", layers=1), ZerothSettings(**SETTINGS | {"interval": 3}))
    for step in range(3):
        assert not optimizer.due()
        optimizer.step([batch(step)])
    assert optimizer.due()
    with pytest.raises(RuntimeError, match="projection round is due"):
        optimizer.step([batch(3)])
    assert optimizer.project(lambda: [batch(4)]) is not None
    assert optimizer.project(lambda: [batch(4)]) is None
    optimizer.step([batch(3)])


def test_only_the_chosen_tensors_are_projected_and_anchored() -> None:
    model = tiny("llama", layers=1)
    optimizer = ZerothOrder(model, ZerothSettings(**SETTINGS | {"projection_roles": ("key",)}))
    assert [t.name for t in optimizer.projected] == ["model.layers.0.self_attn.k_proj.weight"]
    assert sum(a.numel() for a in optimizer.anchors.values()) == 16 * 32
    for step in range(2):
        optimizer.step([batch(step)])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.project(lambda: [batch(7)])
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["model.layers.0.self_attn.k_proj.weight"]


# architecture -> projected tensors with query and value, those of key alone; two layers each
ARCHITECTURES = {
    "llama": (4, 2),
    "qwen3": (4, 2),
    "opt": (4, 2),
    "bert": (4, 2),
    "gpt2": (2, 2),
    "gpt_neox": (2, 2),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_how_many_tensors_are_projected(kind: str) -> None:
    model = tiny(kind)
    tuned = tuned_parameters(model)
    both = projected_parameters(tuned, ("query", "value"))
    assert (len(both), len(projected_parameters(tuned, ("key",)))) == ARCHITECTURES[kind]
    assert all(t.parameter.dim() == 2 for t in both)
    said = ZerothOrder(model, ZerothSettings(method="dizo")).describe()[-1]
    assert said.startswith(f"projection: {len(both)} tensors (query, value")
    assert ("2 of them fused with other roles" in said) == (kind in ("gpt2", "gpt_neox"))


@pytest.mark.parametrize(("kind", "count"), [("llama", 8), ("qwen3", 8), ("gpt2", 4), ("bert", 8)])
def test_how_many_of_an_adapter(kind: str, count: int) -> None:
    """A and B of each: the adapter of a query stands in its place."""
    assert len(projected_parameters(tuned_parameters(with_lora(tiny(kind))), ("query", "value"))) == count


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "query"),
        ("base_model.model.model.layers.3.self_attn.v_proj.lora_B.default.weight", "value"),
        ("bert.encoder.layer.0.attention.self.query.weight", "query"),
        ("gpt_neox.layers.0.attention.query_key_value.weight", "query_key_value"),
        ("transformer.h.0.attn.c_attn.weight", "query_key_value"),
        ("transformer.blocks.0.attn.Wqkv.weight", "query_key_value"),
        ("layers.0.attention.wv.weight", "value"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "query"),
        ("model.layers.0.self_attn.qkv_proj.weight", "query_key_value"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "key_value"),
        ("attn.in_proj_weight", "query_key_value"),
        ("model.layers.0.mlp.down_proj.weight", "down"),
        ("model.embed_tokens.weight", ""),
        ("value_head.summary.weight", ""),
    ],
)
def test_roles_by_name(name: str, role: str) -> None:
    assert role_by_name(name) == role


def test_no_tensor_to_project_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(
        RequestError, match=r"matches none of the 4 tuned tensors[\s\S]*MeZO under another name"
    ):
        ZerothOrder(model, ZerothSettings(method="dizo"))
    model = with_lora(tiny("llama"), ["up_proj", "down_proj"])
    with pytest.raises(RequestError, match=r"tuned modules are called down_proj, up_proj"):
        ZerothOrder(model, ZerothSettings(method="dizo"))
    with pytest.raises(RequestError, match="choose from query, key"):
        ZerothOrder(tiny("llama"), ZerothSettings(method="dizo", projection_roles=("q_proj",)))


def test_with_learning_rate_zero_not_one_bit_changes() -> None:
    model = tiny("llama", torch.bfloat16, layers=1)
    before = bits(model)
    made = rounds(ZerothOrder(model, ZerothSettings(**SETTINGS | {"learning_rate": 0})), 4)
    assert len(made) == 2
    assert all(map(torch.equal, bits(model), before))


def test_a_round_with_a_loss_that_is_not_finite_moves_nothing() -> None:
    model = tiny("llama", layers=1)
    calls = 0

    def loss(m: nn.Module, b: Any, lanes: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        losses = example_losses(candidate_scores(m, b, lanes), b.label)
        return losses * float("nan") if calls == 5 else losses

    optimizer = ZerothOrder(model, ZerothSettings(**SETTINGS, lanes=2), loss)
    for step in range(2):
        optimizer.step([batch(step)])
    before = bits(model)
    with pytest.raises(NotFinite, match="projection after step 1, iteration 3"):
        optimizer.project(lambda: [batch(9)])
    assert all(map(torch.equal, bits(model), before))
    assert optimizer.due()


def test_resuming_keeps_the_anchors() -> None:
    whole, first = tiny("llama", layers=1), tiny("llama", layers=1)
    settings = ZerothSettings(**SETTINGS)
    through = ZerothOrder(whole, settings)
    expected = rounds(through, 4)
    begun = ZerothOrder(first, settings)
    half = rounds(begun, 2)
    again = ZerothOrder(first, settings)  # its own anchors would be the weights of step 2
    again.load_state_dict(begun.state_dict())
    for step in range(2, 4):
        again.step([batch(step)])
    seeds = iter(range(200, 300))
    result = again.project(lambda: [batch(next(seeds))])
    assert [*half, result] == expected
    assert same_weights(whole, first)
    with pytest.raises(RequestError, match="anchors for 2 tensors, this run projects 1"):
        ZerothOrder(first, ZerothSettings(**SETTINGS | {"projection_roles": ("key",)})).load_state_dict(
            begun.state_dict()
        )
