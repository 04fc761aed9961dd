"""How long a step would take at best, by what it computes, moves and sends: an estimate, and called one everywhere.

No kernel is timed. A pass takes as long as the slowest of three: its products at a share of the GPU's published rate,
its bytes at a share of its memory's, what ranks send each other at a share of their link's. The shares are said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.gpu_models import GpuModel
from trimtab.placement.plan import Strategy

COMPILED, PLAIN = 0.55, 0.35
"""Of the published rate of 16-bit products: what an 8B model with LoRA reached on an H200 with compiled layers, and by
transformers' own (benchmarks/results/sft-speed-h200.md)."""
MEMORY, LINK = 0.8, 0.7
"""Of the published bandwidths; a common rule, not measured here."""
FULL_RATE_FP32 = 0.5
"""Products in fp32 (TF32 where a GPU has it) against those in 16 bits, at most."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one rank does in a pass of its rows, and in the step that ends them. Bytes are those of its own GPU."""

    flops: float
    """Forward and backward, nothing computed again."""
    again: float
    """Share of `flops` that is computed once more to save memory."""
    weights: float
    activations: float
    trained: float
    """Bytes of trained weights, of which gradients and two moments are as large."""
    tokens: int
    passes: int
    """Accumulated in one step."""


def tokens_a_second(
    gpu: GpuModel, gpus: int, strategy: Strategy, load: Load, *, compiled: bool, half: bool
) -> float:
    """Of all ranks together, by the estimate."""
    rate = gpu.half_tflops * 1e12 * (COMPILED if compiled else PLAIN) * (1.0 if half else FULL_RATE_FP32)
    compute = load.flops * (1 + load.again) / rate
    # Weights are read in both passes, and once more where something is computed again; activations written and read.
    moved = load.weights * (3 if load.again else 2) + 2 * load.activations
    memory = moved / (gpu.bandwidth * MEMORY)
    link, others = gpu.link * LINK, (gpus - 1) / gpus
    # FSDP gathers all weights in each of the two passes, while it computes.
    sent = 2 * others * load.weights * gpus / link if strategy == "sharded" else 0.0
    # Gradients meet once a step: all of them everywhere, or each at home.
    meeting = (2 if strategy == "data_parallel" else 1) * others * load.trained / link if gpus > 1 else 0.0
    update = 7 * load.trained / (gpu.bandwidth * MEMORY)
    if strategy == "split":
        # One GPU works at a time: each has its share of the bytes, and all of the products are made in turn.
        memory, meeting = memory * gpus, 0.0
    step = load.passes * max(compute, memory, sent) + meeting + update
    ranks = 1 if strategy in ("single", "split") else gpus
    return ranks * load.tokens * load.passes / step


def assumptions() -> list[str]:
    """What the estimate stands on, in words."""
    return [
        f"products at {COMPILED:.0%} of the GPU's published 16-bit rate with compiled layers, {PLAIN:.0%} without",
        f"memory at {MEMORY:.0%} of its published bandwidth, links between GPUs at {LINK:.0%}",
        "sharded weights are gathered while layers compute; gradients meet after the last pass of a step",
    ]
