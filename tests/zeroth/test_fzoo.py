"""FZOO: a plain loop with the same signs, bit for bit; a step without a scale is skipped and counted."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from zeroth_helpers import (
    added,
    batch,
    bits,
    by_chance,
    close_losses,
    fp32,
    plain_loss,
    same_weights,
    tiny,
    trainable,
    with_lora,
)

from trimtab.zeroth import ZerothOrder, ZerothSettings
from trimtab.zeroth.noise import Stream, noise
from trimtab.zeroth.sweep import UPDATE

SETTINGS: dict[str, Any] = {
    "method": "fzoo",
    "learning_rate": 2e-3,
    "eps": 1e-3,
    "queries": 3,
    "seed": 4,
    "weight_decay": 0.1,
}


def reference_fzoo(
    model: nn.Module, s: ZerothSettings, seen: list[tuple[float, ...]]
) -> list[tuple[float, ...]]:
    """N one-sided passes by signs; theta -= lr * sum (l_i - l_0) / (N std) z_i.

    It moves by the losses in `seen`, and gives back those that it measured itself.
    """
    weights, measured = trainable(model), []
    for step in range(len(seen)):
        start = [w.detach().clone() for w in weights]

        def z(query: int, step: int = step) -> list[torch.Tensor]:
            return [noise(Stream(s.seed, step, i, query, "signs"), w.shape) for i, w in enumerate(weights)]

        losses = [plain_loss(model, [batch(step)])]
        for query in range(1, s.queries + 1):
            for w, before, n in zip(weights, start, z(query), strict=True):
                w.data = added(before, s.eps, n)
            losses.append(plain_loss(model, [batch(step)]))
        measured.append(tuple(losses))
        losses = list(seen[step])
        mean = sum(losses[1:]) / s.queries
        std = math.sqrt(sum((x - mean) ** 2 for x in losses[1:]) / s.queries)
        rate = fp32(s.learning_rate)
        made = [
            before.float() * torch.tensor(fp32(1 - rate * s.weight_decay) if before.dim() > 1 else 1.0)
            for before in start
        ]
        for query in range(1, s.queries + 1):
            c = torch.tensor(fp32(rate * ((losses[query] - losses[0]) / (s.queries * std))))
            made = [m - c * n for m, n in zip(made, z(query), strict=True)]
        for i, (w, m) in enumerate(zip(weights, made, strict=True)):
            w.data = by_chance(m, w.dtype, Stream(s.seed, step, i, UPDATE))
    return measured


@pytest.mark.parametrize("lanes", [None, 1, 3, 4], ids=["default", "one", "groups", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_full_tuning_is_the_plain_loop(dtype: torch.dtype, lanes: int | None) -> None:
    model = tiny("llama", dtype)
    plain = copy.deepcopy(model)
    # In bf16 the passes lie further apart, so that rounding cannot be taken for a step.
    eps = 0.1 if dtype == torch.bfloat16 else SETTINGS["eps"]
    settings = ZerothSettings(**SETTINGS | {"eps": eps, "lanes": lanes})
    optimizer = ZerothOrder(model, settings)
    assert optimizer.lanes == (lanes or 1)
    seen = [optimizer.step([batch(step)]).losses for step in range(3)]
    expected = reference_fzoo(plain, settings, seen)
    assert seen == expected if optimizer.lanes == 1 else close_losses(seen, expected, dtype)
    assert same_weights(model, plain)
    assert optimizer.forwards == 12


@pytest.mark.parametrize("lanes", [None, 4])
def test_lora_is_the_plain_loop(lanes: int | None) -> None:
    model = with_lora(tiny("gpt2"))
    plain, settings = copy.deepcopy(model), ZerothSettings(**SETTINGS, lanes=lanes)
    optimizer = ZerothOrder(model, settings)
    seen = [optimizer.step([batch(step)]).losses for step in range(2)]
    expected = reference_fzoo(plain, settings, seen)
    assert seen == expected if optimizer.lanes == 1 else close_losses(seen, expected)
    assert same_weights(model, plain)


def test_without_a_spread_the_step_is_skipped_and_counted() -> None:
    """Identical losses leave nothing to divide by: no weight moves, by decay neither."""
    model = nn.Linear(4, 2)
    before = bits(model)
    optimizer = ZerothOrder(
        model, ZerothSettings(**SETTINGS), lambda m, b, lanes: m(b.repeat(lanes, 1)).view(lanes, -1) * 0 + 2.5
    )
    result = optimizer.step([torch.ones(3, 4)])
    assert result.skipped
    assert (result.coefficients, result.loss) == ((), 2.5)
    assert (optimizer.skipped, optimizer.step_number) == (1, 1)
    assert all(map(torch.equal, bits(model), before))


def test_with_learning_rate_zero_not_one_bit_changes() -> None:
    model = tiny("llama", torch.bfloat16, layers=1)
    before = bits(model)
    optimizer = ZerothOrder(model, ZerothSettings(**SETTINGS | {"learning_rate": 0}))
    for step in range(3):
        assert not optimizer.step([batch(step)]).skipped
    assert all(map(torch.equal, bits(model), before))
