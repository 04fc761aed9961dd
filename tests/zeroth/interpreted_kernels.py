"""Run with TRITON_INTERPRET=1: the Triton kernels on the CPU against the plain code, by Triton's own interpreter."""

from __future__ import annotations

import copy

import torch
from zeroth_helpers import batch, tiny

from trimtab.zeroth import ZerothSettings, thin, tuned_parameters
from trimtab.zeroth import graph as graph_module
from trimtab.zeroth import kernels as k
from trimtab.zeroth.graph import CapturedPasses
from trimtab.zeroth.lanes import LaneModules
from trimtab.zeroth.noise import Stream, noise
from trimtab.zeroth.optimizer import _candidate_losses
from trimtab.zeroth.parameters import projected_parameters
from trimtab.zeroth.steps import step_lanes
from trimtab.zeroth.sweep import PROJECTION, Change, Directions, Ratios, Sweep

CPU = torch.device("cpu")
SEED = 0x0123_4567_89AB_CDEF


def perturbing() -> None:
    weight, key = torch.randn(37, 24), torch.tensor([5], dtype=torch.int32)
    launch = k.Launch(2, CPU)
    launch.fill(SEED, 7, [0, 0], [1e-3, -1e-3])
    made = k.perturbed(weight, key, launch.state, launch.coefficients, True, False)
    move = torch.tensor(1e-3) * noise(Stream(SEED, 7, 5), weight.shape)
    assert torch.equal(made[0], weight + move)
    assert torch.equal(made[1], weight - move)
    part = k.perturbed(weight[8:16], key, launch.state, launch.coefficients, True, False, first=8 * 24)
    assert torch.equal(part[0], made[0][8:16])
    ids = torch.randint(0, 37, (4, 6))
    rows = k.perturbed_rows(weight, ids, key, launch.state, launch.coefficients, True, False)
    assert torch.equal(rows[:2], made[0][ids[:2]])
    assert torch.equal(rows[2:], made[1][ids[2:]])
    several = k.Launch(3, CPU)
    several.fill(SEED, 9, [0, 1, 2], [0.0, 0.5, 0.5])
    made = k.perturbed(weight, key, several.state, several.coefficients, False, True)
    assert torch.equal(made[0], weight)
    for query in (1, 2):
        assert torch.equal(
            made[query], weight + 0.5 * noise(Stream(SEED, 9, 5, query, "signs"), weight.shape)
        )
    small = [(torch.randn(n), index, False) for n, index in ((32, 4), (7, 9), (1100, 2))]
    together = k.PerturbedSmall(small, 2, carry=False, stochastic=True)
    together(launch, True, False)
    for (tensor, index, _), view in zip(small, together.views, strict=True):
        move = torch.tensor(1e-3) * noise(Stream(SEED, 7, index), tensor.shape)
        assert torch.equal(view, torch.stack([tensor + move, tensor - move]))


def updating(dtype: torch.dtype) -> None:
    # By chance: to the nearest, Triton's interpreter rounds bf16 in a way of its own.
    model = tiny("qwen3", dtype)
    plain = copy.deepcopy(model)
    directions = Directions(SEED, 11, "signs", (1, 2), (3e-4, -1e-4))
    tuned = tuned_parameters(plain)
    Sweep(tuned).update_(tuned, directions, 0.999)
    update = k.UpdateAll([(t.parameter.detach(), t.index, t.decays) for t in tuned_parameters(model)], True)
    launch, shrink = update.launch(2)
    launch.fill(SEED, 11, directions.queries, directions.coefficients)
    shrink.fill_(0.999)
    update(launch, shrink, signs=True)
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


def rescaling(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype, layers=1)
    each = projected_parameters(tuned_parameters(model), ("query",))[0]
    weight = each.parameter.detach()
    anchor = (weight.float() + 0.01 * torch.randn(weight.shape)).to(dtype)
    change = Ratios(SEED, 3, {each.index: anchor}, ({each.index: 1.1}, {each.index: 0.9}))
    expected = Sweep([each]).copies(each, change, (0, 1))
    launch, key = k.Launch(1, CPU), torch.tensor([each.index], dtype=torch.int32)
    launch.fill(SEED, 3, [PROJECTION], [0.0])
    ratios = torch.tensor([1.1, 0.9])
    made = k.rescaled(weight, anchor, ratios, key, launch.state, True)
    assert torch.equal(made, torch.stack(expected))
    assert not torch.equal(made[0], weight)
    part = k.rescaled(weight[8:16], anchor[8:16], ratios, key, launch.state, True, 8 * weight.shape[1])
    assert torch.equal(part, made[:, 8:16])


def passing(kind: str) -> None:
    """The stand-in modules, uncaptured, against the lanes of the plain code."""
    model = tiny(kind)
    tuned = tuned_parameters(model)
    modules = LaneModules(model, tuned, Sweep(tuned))
    projected = projected_parameters(tuned, ("query", "value"))
    anchors = {t.index: torch.randn_like(t.parameter) * 0.02 for t in projected}
    changes: list[tuple[Change, int]] = [
        (step_lanes(ZerothSettings(method="mezo", eps=1e-2, seed=5), 3), 2),
        (step_lanes(ZerothSettings(method="fzoo", eps=1e-2, seed=5, queries=3), 3), 4),
        (Ratios(5, 3, anchors, ({t: 1.1 for t in anchors}, {t: 0.9 for t in anchors})), 2),
    ]
    graph_module._SCRATCH_FLOOR = 1024
    for change, lanes in changes:
        passes = CapturedPasses(model, tuned, False, True)
        rows = batch(2)
        with torch.no_grad(), modules.running(change, range(lanes)):
            expected = _candidate_losses(model, rows, lanes)
        shape = graph_module._shape_of(rows)
        with torch.no_grad():
            passes._fill(change, range(lanes))
            with passes._installed(change, lanes) as stand_in:
                for _ in range(
                    2
                ):  # the first pass takes down the order of the weights, the second makes them ahead
                    found = passes._pass(graph_module._packed(rows, shape), shape, lanes, stand_in)
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        assert not torch.equal(expected[0], expected[1])


def carrying(kind: str, most_rows: int, dtype: torch.dtype, tied: bool, joined: bool = False) -> None:
    """A pass that writes the update of the step before, against the update on its own and then the pass.

    `joined`: with room for the products of several layers as one; otherwise there is none.
    """
    thin.MOST_ROWS, thin.LEAST_HEIGHT = most_rows, 1 << 14 if joined else 0
    graph_module._SCRATCH_FLOOR = 1 << 16 if joined else 1024
    model = tiny(kind, dtype, tie=tied)
    plain = copy.deepcopy(model)
    tuned, of_plain = tuned_parameters(model), tuned_parameters(plain)
    first, second = (step_lanes(ZerothSettings(method="mezo", eps=1e-2, seed=5), step) for step in (3, 4))
    line = Directions(5, 3, "normal", (0,), (3e-3,))
    sweep = Sweep(of_plain)
    sweep.update_(of_plain, line, 0.999)
    rows = batch(2)
    with torch.no_grad(), LaneModules(plain, of_plain, sweep).running(second, range(2)):
        expected = _candidate_losses(plain, rows, 2)
    shape = graph_module._shape_of(rows)
    passes = CapturedPasses(model, tuned, False, True)
    before = copy.deepcopy(model)
    packed = graph_module._packed(rows, shape)
    with torch.no_grad():
        passes._fill(first, range(2))
        with passes._installed(first, 2) as stand_in:
            for _ in range(2):
                passes._pass(packed, shape, 2, stand_in)
            assert all(map(torch.equal, model.parameters(), before.parameters()))
            passes._fill(second, range(2), k.Owed(5, 3, 0, 3e-3, 0.999))
            found = passes._pass(packed, shape, 2, stand_in)
            for one, two in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two)
            passes._fill(second, range(2))
            again = passes._pass(packed, shape, 2, stand_in)
            assert stand_in.ahead is not None
            together = [len(piece.rows) for piece in stand_in.ahead._order if len(piece.rows) > 1]
            assert together == ([3, 2] * model.config.num_hidden_layers if joined else [])
    close = {} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(found, expected, **(close or {"rtol": 1e-5, "atol": 2e-5}))
    assert torch.equal(again, found)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


if __name__ == "__main__":
    torch.manual_seed(0)
    perturbing()
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        updating(kind)
        rescaling(kind)
    for name in ("qwen3", "llama", "gpt2"):
        passing(name)
    # All products by themselves, none, the head alone; embeddings that are the head too or not.
    carrying("qwen3", 64, torch.bfloat16, True)
    carrying("qwen3", 0, torch.bfloat16, False)
    carrying("qwen3", 4, torch.float32, False)
    carrying("gpt2", 4, torch.float32, True)
    carrying("qwen3", 0, torch.bfloat16, True, joined=True)
    carrying("llama", 0, torch.float32, False, joined=True)
    print("all agree")
