"""What takes the place of a CUDA graph, and of values, where a captured pass is rehearsed in shapes on a virtual GPU.

A capture there is the pass itself, its memory taken from a pool that lasts, as a graph's does; a replay asks for none.
So the ring, the stacked lanes and the pool are counted as on a GPU. Nothing here computes a loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RehearsedGraph:
    """A pass that was captured in shapes."""

    def replay(self) -> None:
        """A replay runs in memory that the capture has taken: there is nothing to count."""


@contextmanager
def capturing(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """Inside, the pass is captured: work goes to the stream, memory comes from the pool."""
    if not isinstance(graph, RehearsedGraph):
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
        return
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        yield


def with_values(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """The module over small random tensors on the CPU, in place of those that have a shape alone."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {
        name: nn.Parameter(torch.randn(p.shape, generator=generator).to(p.dtype), requires_grad=False)
        if p is not None
        else None
        for name, p in module._parameters.items()
    }
    return twin
