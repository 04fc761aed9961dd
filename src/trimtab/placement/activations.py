"""What a layer and a head keep for the backward pass, per token, by the way in which they are computed. Estimates.

Knows widths and ways, no model; the figures are held against measured peaks (tests/placement/test_activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_CHUNK_TOKENS = 256
"""A plain head computes logits in tiles of about this many tokens, not for the whole batch."""
_CHUNK_ELEMENTS = 2**28
"""Logits that a chunked head has at once."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """How a training step is computed, as far as memory shows it."""

    compiled: bool = False
    """The language model's layers are compiled: norms and element-wise steps are made again, not kept."""
    kernels: bool = False
    """By Triton's kernels: the product of gate and up is made again in the backward pass, logits stay in 16 bits."""
    kept: float = 1.0
    """Share of what a compiled layer could keep (`speed.activation_memory_budget`)."""
    chunked_head: bool = False


def layer_bytes(hidden: int, intermediate: int, attention: int, size: int, how: Computed) -> float:
    """What one layer keeps of one token, in numbers of `size` bytes."""
    if not how.compiled:
        # The norms' inputs and outputs in fp32, and multiples of the hidden, MLP and attention widths. Fitted to five
        # models (benchmarks/plan_memory.py).
        return 4 * 4 * hidden + size * (4.0 * hidden + 3.6 * intermediate + 3.65 * attention)
    # Inputs of the layer, of its norms and of its products; queries, keys and values; gate, up and their product.
    whole = size * (6 * hidden + attention + (2 if how.kernels else 3) * intermediate)
    return how.kept * whole + (1 - how.kept) * size * hidden


def head_bytes(tokens: int, hidden: int, vocabulary: int, size: int, how: Computed) -> int:
    """What the head needs while it is computed."""
    if not how.chunked_head:
        # Logits of one tile and their gradient in fp32, and the softmax between them.
        return 3 * 4 * min(tokens, HEAD_CHUNK_TOKENS) * vocabulary
    # A chunk of logits, without kernels in fp32 as well, and the gradient of every hidden state.
    return (size if how.kernels else size + 4) * min(
        tokens * vocabulary, _CHUNK_ELEMENTS
    ) + tokens * hidden * size
