"""How long a step would take at best, by the kernels that it launches: an estimate, and called one everywhere.

No kernel is timed. Each takes as long as the slower of its products, at a share of the GPU's published rate, and its
bytes, at a share of its memory's; all of them together no less than the host needs to launch them. What ranks send each
other goes at a share of their link's. The shares are said here, with what they were taken from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from trimtab.gpu_models import GpuModel
from trimtab.launches import By, Launch, Runs, Work
from trimtab.placement.plan import Strategy

PRODUCTS: dict[Runs, float] = {"half": 0.68, "attention": 0.45, "single": 0.68}
"""Of the published rate: what products of 8192 × 8192 × 8192 and cuDNN's attention of 4,096 tokens, both ways, reached
on an H200 in bf16 (benchmarks/results/sft-speed-h200.md); that fp32's reach the same share is assumed."""
MEMORY: dict[By, float] = {"eager": 0.6, "compiled": 0.8, "graph": 0.8}
"""Of the published bandwidth. 0.6 is what all eager kernels without products of one step reached together on an H200,
dropout, norms and copies among them (benchmarks/results/step-estimates-h200.md); 0.8 for fused ones is a common rule,
not measured here."""
LINK = 0.7
"""Of the published bandwidth; a common rule, not measured here."""
SHORTEST = 3e-6
"""Seconds that no kernel is under, with the gap to the next one."""
HOST: dict[By, float] = {"eager": 22e-6, "compiled": 22e-6, "graph": 0.0, "entry": 0.25e-3}
"""Seconds in which the host launches one kernel: through torch's dispatcher and autograd, from compiled code, from a
graph that was captured; and in which it finds its way into compiled code and out of it. By chains of small kernels
(benchmarks/launch_costs.py) eager ones took 18 to 31 µs, compiled ones 20 to 27, and a graph 0.22 to 0.32 ms."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one rank does in a step. Bytes are those of its own GPU."""

    a_pass: Work
    a_step: Work = field(default_factory=dict)
    """What comes once a step: an update, a generation."""
    passes: int
    """Accumulated in one step."""
    weights: float = 0.0
    trained: float = 0.0
    """Bytes of gradients that ranks exchange."""


def step_seconds(gpu: GpuModel, gpus: int, strategy: Strategy, load: Load) -> float:
    """One step, by the estimate. Where layers are split one GPU works at a time, so their kernels add up."""
    sent = gathering(gpu, gpus, strategy, load.weights)
    # Gradients meet once a step: all of them everywhere, or each at home.
    times = {"data_parallel": 2, "sharded": 1}.get(strategy, 0)
    meeting = times * (gpus - 1) / gpus * load.trained / (gpu.link * LINK)
    return load.passes * max(seconds(gpu, load.a_pass), sent) + seconds(gpu, load.a_step) + meeting


def gathering(gpu: GpuModel, gpus: int, strategy: Strategy, weights: float) -> float:
    """Seconds a pass in which shards of so many bytes are sent: FSDP gathers all in both ways, while it computes."""
    return 2 * (gpus - 1) * weights / (gpu.link * LINK) if strategy == "sharded" else 0.0


def seconds(gpu: GpuModel, work: Work) -> float:
    """Of these launches one after the other."""
    working = sum(number * on_gpu(gpu, one) for one, number in work.items())
    return max(working, sum(number * HOST[one.by] for one, number in work.items()))


def on_gpu(gpu: GpuModel, one: Launch) -> float:
    """Seconds that the GPU works for one launch."""
    if one.by == "entry":
        return 0.0
    products = one.flops / _rates(gpu)[one.runs] if one.flops else 0.0
    return max(products, one.nbytes / (gpu.bandwidth * MEMORY[one.by]), SHORTEST)


@cache
def _rates(gpu: GpuModel) -> Mapping[Runs, float]:
    published: dict[Runs, float] = {
        "half": gpu.half_tflops,
        "attention": gpu.half_tflops,
        "single": gpu.single_tflops,
    }
    return {runs: published[runs] * 1e12 * share for runs, share in PRODUCTS.items()}


def floor(gpu: GpuModel, work: Work, larger: float, again: float) -> float:
    """No pass over so many times as many rows is faster: its products, and the host's time, which rows do not change.

    `again`: which share of the pass is computed once more to save memory.
    """
    rates = _rates(gpu)
    products = sum(number * one.flops / rates[one.runs] for one, number in work.items() if one.flops)
    host = sum(number * HOST[one.by] for one, number in work.items())
    return max(products * larger, host) * (1 + again)


def assumptions() -> list[str]:
    """What the estimate stands on, in words."""
    return [
        f"every kernel of the executed step takes the longer of its products ({PRODUCTS['half']:.0%} of the GPU's "
        f"published rate, attention {PRODUCTS['attention']:.0%}) and its bytes ({MEMORY['eager']:.0%} of its "
        f"bandwidth, in compiled code {MEMORY['compiled']:.0%})",
        f"the host launches a kernel in {HOST['eager'] * 1e6:.0f} µs, and enters compiled code in "
        f"{HOST['entry'] * 1e3:.2f} ms",
        f"links between GPUs run at {LINK:.0%}; sharded weights are gathered while layers compute; gradients meet "
        "after the last pass of a step",
        "reading the data, saving and evaluating are not in it",
    ]
