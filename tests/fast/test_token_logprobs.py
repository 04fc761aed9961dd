"""Log-probabilities by a frozen head: those of whole logits, with their gradients, whatever is done to the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.fast import logprobs
from trimtab.fast.logprobs import token_logprobs

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"scale": 0.0625, "temperature": 1.3},
    "softcap": {"softcap": 3.0, "scale": 2.0, "temperature": 0.9},
}


def made(dtype: torch.dtype, rows: int = 23, bias: bool = True) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, 16, generator=draw, dtype=torch.float64)
    weight = torch.randn(41, 16, generator=draw, dtype=torch.float64)
    shift = torch.randn(41, generator=draw, dtype=torch.float64) if bias else torch.zeros(41)
    tokens = torch.randint(0, 41, (rows,), generator=draw)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), shift.to(dtype), tokens


def plainly(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    tokens: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T + bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    every = (logits / temperature).log_softmax(-1)
    return every.gather(1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tile", [1 << 20, 41 * 8 * 5])
def test_values_and_gradients_are_those_of_whole_logits(
    shape: dict[str, Any], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "TILE_BYTES", tile)
    hidden, weight, bias, tokens = made(torch.float64)
    weights = torch.randn(len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    values, entropy = plainly(hidden, weight, bias, tokens, **shape)
    (wanted,) = torch.autograd.grad((values * weights).sum(), hidden)
    ours, our_entropy = token_logprobs(hidden, weight, tokens, bias=bias, **shape)
    (found,) = torch.autograd.grad((ours * weights).sum(), hidden)
    torch.testing.assert_close(ours, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(our_entropy, entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert not our_entropy.requires_grad


def test_half_precision_is_summed_in_fp32() -> None:
    hidden, weight, _, tokens = made(torch.float32, bias=False)
    wanted, _ = plainly(hidden, weight, torch.zeros(41), tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, entropy = token_logprobs(hidden, weight, tokens)
    assert ours.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.05)
    ours.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_no_rows_are_a_part_of_the_graph_and_no_gradient_is_wanted_without_it() -> None:
    hidden, weight, _, tokens = made(torch.float32)
    ours, _ = token_logprobs(hidden[:0], weight, tokens[:0])
    ours.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, tokens)[0].requires_grad


def test_a_token_without_a_chance_leaves_the_entropy_a_number() -> None:
    hidden, weight, bias, tokens = made(torch.float32)
    bias = bias.index_fill(0, torch.tensor([3]), float("-inf"))
    _, entropy = token_logprobs(hidden, weight, tokens.clamp(min=4), bias=bias)
    assert entropy.isfinite().all()
