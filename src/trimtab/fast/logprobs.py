"""Log-probabilities of chosen tokens and entropies from hidden states and a frozen head, a few rows at a time.

The logits of all rows are never held at once. What a row's log-probability gains by its hidden state is one vector, so
it is made in the forward pass, while the row's probabilities are there; the backward pass only weighs these vectors by
the loss's gradients, whatever the loss is. So a row goes through the head twice (logits, and back) and never a third
time to compute its logits again. The head gets no gradient, and the entropy, which is told and not trained on, none.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.fast.kernels import HALVES, usable_on

TILE_BYTES = 512 * 2**20
"""Of one tile of logits."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N) log-probabilities of `tokens` (N) and (N) entropies, both in fp32 at least, for `hidden` (N, H).

    Logits are `hidden @ weightᵀ + bias`, times `scale`, through `softcap · tanh(· / softcap)`, over `temperature`.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    # Over a temperature is one scale and one softcap: c · tanh(s · x / c) / t = c/t · tanh(s/t · x / (c/t)).
    softcap = None if softcap is None else softcap / temperature
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, tokens, scale / temperature, softcap)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The rows are split by a number that hangs on shapes alone: no device is asked.
        tile = max(1, TILE_BYTES // (weight.shape[0] * hidden.element_size()))
        scored = _by_kernel if usable_on(hidden) and hidden.dtype in HALVES else _plainly
        wide = torch.promote_types(hidden.dtype, torch.float32)
        told = torch.empty(2, len(hidden), dtype=wide, device=hidden.device)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden.device.type, enabled=False):
            weight = weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
            for start in range(0, len(hidden), tile):
                part = slice(start, start + tile)
                logits = torch.nn.functional.linear(hidden[part], weight, bias)
                told[:, part], slope = scored(logits, tokens[part], scale, softcap)
                if slopes is not None:
                    torch.mm(slope, weight, out=slopes[part])
        ctx.save_for_backward(slopes)
        losses, entropy = told.unbind()
        ctx.mark_non_differentiable(entropy)
        return -losses, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        # The slopes are of the losses, which are the log-probabilities' opposites.
        found = None if slopes is None else (slopes * -gradients[0][:, None]).to(slopes.dtype)
        return found, None, None, None, None, None


def _by_kernel(
    logits: torch.Tensor, tokens: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(2, N) losses and entropies, and the losses' slope by the logits (N, V)."""
    from trimtab.fast.kernels.cross_entropy import cross_entropy

    losses, _, entropy = cross_entropy(
        logits, tokens.contiguous(), scale=scale, softcap=softcap, gradient=True
    )
    return torch.stack([losses, entropy]), logits


def _plainly(
    logits: torch.Tensor, tokens: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch's own operations."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    chosen = tokens[:, None]
    log_total = scores.logsumexp(-1, keepdim=True)
    losses = (log_total - scores.gather(1, chosen))[:, 0]
    chances = (scores - log_total).exp_()
    # What has no chance has no part in it, where 0 · -∞ would be no number.
    entropy = log_total[:, 0] - torch.where(chances > 0, chances * scores, 0).sum(-1)
    slope = chances.scatter_add_(1, chosen, torch.full_like(chosen, -1, dtype=chances.dtype))
    if softcap is not None:
        slope *= 1 - (scores / softcap) ** 2
    return torch.stack([losses, entropy]), (slope * scale).to(logits.dtype)
