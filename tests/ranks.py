"""Ranks of a test, as forks of one process that has imported torch: they alone do not wait for that import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "trimtab.virtual.context", "trimtab.zeroth"]
"""Imported before a fork. Nothing computes there: threads of a library do not outlive a fork."""


def run_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Run it as `function(rank, *arguments)` in so many processes, four minutes at most; raises what failed there."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        function, arguments, nprocs=ranks, join=False, start_method="forkserver"
    )
    try:
        waited = 0
        while not context.join(timeout=10):
            waited += 10
            assert waited < 240, "the ranks did not come to an end"
    finally:
        for process in context.processes:
            process.kill()
