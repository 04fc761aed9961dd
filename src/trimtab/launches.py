"""One launch of a kernel, as it is counted on a virtual GPU, for who estimates a time. The standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Runs = Literal["half", "single", "attention", ""]
"""What the products of a kernel run on: 16-bit numbers, fp32, attention in 16 bits; nothing where it has none."""
By = Literal["eager", "compiled", "graph", "entry"]
"""Who launches it: torch's dispatcher, compiled code, or a graph that was captured. `entry` is no kernel: the host's
way into compiled code and out of it, once for each graph that is run there or back."""


class Launch(NamedTuple):
    """A kernel by what it does."""

    flops: int
    nbytes: int
    runs: Runs
    by: By


Work = Mapping[Launch, float]
"""How often each is launched."""
