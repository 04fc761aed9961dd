"""Proves on the loaded model, before a run trusts it, that rows laid end to end do not see each other.

Two short rows go through the model alone, then end to end. Where what comes out differs by more than rounding, tokens
of this architecture meet by other ways than attention (a state, a convolution, a bias by distance), and the caller
falls back. It changes no weight, and leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

TOKENS = (6, 9)
"""Lengths of the two rows; longer ones where the model's window is short, so that it is met."""
_WINDOW = 256
ROUNDING, ROUNDING_HALF = 1e-3, 0.05
"""By how much of their size numbers may differ that were computed in another order, and in half precision."""
_LEAK = 0.2
"""In half precision rounding may hide a leak: so much of what a whole leak would change may not be changed."""

Inputs = dict[str, torch.Tensor]


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Without gradients and dropout; every module is in its own mode again afterwards, and so are random numbers."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def short_rows(config: Any) -> list[list[int]]:
    """Two rows of tokens that differ, from all over the vocabulary."""
    window = getattr(config, "sliding_window", None) or 0
    more = window + 1 if 0 < window <= _WINDOW else 0
    vocabulary = max(int(config.vocab_size), 3)
    numbers = iter(range(1, 10_000))
    return [[next(numbers) * 7919 % (vocabulary - 1) + 1 for _ in range(n + more)] for n in TOKENS]


def rows_apart(
    hidden: Callable[[Mapping[str, Any]], torch.Tensor],
    laid: Callable[[list[list[int]]], Mapping[str, Any]],
    rows: list[list[int]],
    device: torch.device | str,
    *,
    half: bool,
) -> str | None:
    """None where rows that `laid` puts end to end come out as they do alone; else what was seen.

    `hidden` gives the last hidden states of a batch, computed in half precision or not.
    """

    def of(ids: list[int]) -> torch.Tensor:
        return hidden({"input_ids": torch.tensor([ids], device=device)})[0].float()

    alone = torch.cat([of(row) for row in rows])
    together = hidden(laid(rows))[0].float()
    if together.shape != alone.shape:
        return f"they come out in another shape ({list(together.shape)})"
    if not together.isfinite().all() or not alone.isfinite().all():
        return None if torch.equal(together.isfinite(), alone.isfinite()) else "their numbers are not finite"
    apart, size = together - alone, alone.abs().mean()
    off = float(apart.abs().mean() / size.clamp(min=1e-20))
    if off > (ROUNDING_HALF if half else ROUNDING):
        return f"their hidden states differ by {off:.2%} from those alone"
    if half:
        second = len(rows[0])
        leak = of([token for row in rows for token in row])[second:] - alone[second:]
        share = float((apart[second:] * leak).sum() / leak.square().sum().clamp(min=1e-20))
        if abs(share) > _LEAK:
            return f"the second of two rows sees the first (by {share:.0%} of what it could)"
    return None
