"""CUDA graphs where shapes alone are rehearsed: what a capture takes of memory. Nothing is recorded or replayed.

A capture takes its memory from a pool of its own, which keeps it as long as the graph lives; a replay takes none. With
values a replay would have to compute them again, of which a virtual GPU knows nothing: there a graph is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.virtual import state
from trimtab.virtual.allocator_parts import SHARED
from trimtab.virtual.memory_stats import Pool
from trimtab.virtual.state import NotSimulated


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        in_force = state.machine()
        if in_force is None or not in_force.shapes:
            raise NotSimulated(
                "torch.cuda.CUDAGraph is not simulated by virtual GPUs (a graph records kernels, and they have none); "
                "rehearse this program with graph capture switched off, or its memory alone with --shapes-only."
            )
        self._own = Pool()
        self._pool: Any = self._own.id

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self._pool = pool or self._own.id
        self._index = torch.cuda.current_device()
        _route(self._index, self._pool)

    def capture_end(self) -> None:
        _route(self._index, SHARED)

    def pool(self) -> Any:
        return self._pool

    def replay(self) -> None:
        """The same kernels on the same memory."""

    def reset(self) -> None:
        self._own = Pool()

    def instantiate(self) -> None:
        """It is ready as soon as it is captured."""

    def enable_debug_mode(self) -> None:
        """There is nothing to be written down."""


def _route(index: int, pool: Any) -> None:
    in_force = state.machine()
    assert in_force is not None
    device = in_force.at(index)
    device.ledger.settle()
    device.pool.select(device.pool.stream, pool)
