"""How SHIRG scores the tokens of a foveal view and chooses among them. Pure functions of tensors: no model, no weights.

Shapes: n pictures, N tokens of a view in raster order, D features. A score has a number for each token, (n, N), and
more is better. A choice is not differentiable, so these run without gradients; the chosen features keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F


def unit_range(scores: torch.Tensor) -> torch.Tensor:
    """Each row from 0 to 1. A row whose values differ by rounding only says nothing, and becomes 0."""
    low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    span = high - low
    means_something = span > 1e-6 * torch.maximum(low.abs(), high.abs())
    return torch.where(means_something, (scores - low) / span.clamp(min=torch.finfo(scores.dtype).tiny), 0.0)


def attention_to_mean(tokens: torch.Tensor) -> torch.Tensor:
    """Cosine to the picture's mean token: stands for attention where a tower has no pooling head.

    SigLIP has no class token; its first token is the corner patch, and being like the corner means nothing.
    """
    return F.cosine_similarity(tokens, tokens.mean(1, keepdim=True), dim=-1)


def similarity(projected: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
    """Cosine of each token to the question's mean embedding (n, D), both in the language model's space."""
    return F.cosine_similarity(projected, question[:, None], dim=-1)


def edges(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """Strength of the edges under each token: Sobel's gradient of the grey picture (n, 3, H, W), averaged per patch."""
    grey = F.pad(pixels.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    # As differences of sums rather than a convolution: an even surface is exactly 0.
    down = grey[..., :-2, :] + 2 * grey[..., 1:-1, :] + grey[..., 2:, :]
    along = grey[..., :-2] + 2 * grey[..., 1:-1] + grey[..., 2:]
    strength = torch.hypot(down[..., 2:] - down[..., :-2], along[..., 2:, :] - along[..., :-2, :])
    return F.avg_pool2d(strength, patch).flatten(1)


def distance(tokens: torch.Tensor) -> torch.Tensor:
    """How far a token is from all the others: 1 − its mean cosine to them. Repeated tokens come out low."""
    unit = F.normalize(tokens, dim=-1)
    others = unit.sum(1, keepdim=True) - unit
    return 1 - (unit * others).sum(-1) / max(1, tokens.shape[1] - 1)


def radial(side: int, sigma: float, way: str, like: torch.Tensor) -> torch.Tensor:
    """Weight of each place: exp(−(r/σ)²) for `inward`, one minus it for `outward`; r is 1 at the middle of an edge."""
    line = (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) / side * 2 - 1
    squared = (line[:, None] ** 2 + line[None, :] ** 2).flatten()
    inward = torch.exp(-squared / sigma**2)
    return inward if way == "inward" else 1 - inward


def steady(readings: torch.Tensor, most: float) -> torch.Tensor:
    """Which tokens the readings of attention (n, readings, N) agree about: standard deviation of at most `most`.

    Each reading is brought to 0 … 1 first. The gate is a token's own: one disputed token takes no other with it.
    """
    return unit_range(readings).std(1, correction=0) <= most


def total(
    parts: Mapping[str, torch.Tensor],
    weights: Mapping[str, float],
    *,
    place: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The declared score: weighted sum of the parts, each brought to 0 … 1, times the place's weight.

    What the gate closes out comes after everything else, in its own order.
    """
    summed = unit_range(
        torch.stack([weights[name] * unit_range(part) for name, part in parts.items()]).sum(0)
    )
    if place is not None:
        summed = summed * place
    return summed if gate is None else torch.where(gate, summed, summed - 2)


def choose(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Indices of the best `keep` tokens, ascending, so that they stay in raster order; of equals the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :keep].sort(-1).values


def choose_merged(
    scores: torch.Tensor, tokens: torch.Tensor, keep: int, least: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `choose`, but a token with a better twin (cosine of at least `least`) gives way to the next best token.

    Gives the indices, and a matrix (n, keep, N) that averages into each chosen token those whose best twin it is. The
    number of tokens is fixed: where too few are left without a twin, the best of those that gave way come back.
    """
    rank = torch.empty_like(scores, dtype=torch.long)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank.scatter_(1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order))
    unit = F.normalize(tokens, dim=-1)
    better = (unit @ unit.mT >= least) & (rank[:, None, :] < rank[:, :, None])
    gives_way = better.any(-1)
    last = scores.shape[1]
    best_twin = torch.where(better, rank[:, None, :], last).argmin(-1)
    kept = choose(-(rank + last * gives_way).float(), keep)
    own = torch.arange(last, device=scores.device).expand_as(best_twin)
    is_kept = torch.zeros_like(gives_way).scatter_(1, kept, True)
    goes_to = torch.where(is_kept | ~gives_way, own, best_twin)
    members = (goes_to[:, None, :] == kept[:, :, None]).to(tokens.dtype)
    return kept, members / members.sum(-1, keepdim=True)
