"""Futures of collectives: `work.get_future()` gives the tensors that the program handed in, on their virtual GPUs.

gloo's own futures hold the payloads, and some of its operations have none. Asking for a future waits for the collective
here, so a callback runs at once, in the thread that adds it; nothing is simulated of a stream that goes on meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trimtab.virtual import whole_averages
from trimtab.virtual.state import NotSimulated, Patch

# Each takes its results as its first argument and gives back a handle.
_COLLECTIVES = frozenset(
    ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "allgather")
) | {
    *("allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    "all_to_all_single",
}

_results: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()
"""The tensors that each collective writes, by its handle."""


def patches() -> list[Patch]:
    """What to replace while virtual GPUs are in force."""
    group, work = dist.ProcessGroup, dist.Work
    # Names differ from one torch to the next.
    made = [
        (group, name, _remembering(whole_averages.as_nccl(vars(group)[name])))
        for name in _COLLECTIVES
        if name in vars(group)
    ]
    return [
        *made,
        (work, "get_future", _get_future(vars(work)["get_future"])),
        (work, "result", _result(vars(work)["result"])),
    ]


def _remembering(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = real(group, *args, **kwargs)
        if work is not None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            _results[work] = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        return work

    return collective


def _get_future(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(real)
    def get_future(work: Any) -> Any:
        results = _results.get(work)
        if results is None:
            try:
                return real(work)
            except RuntimeError as error:
                if "getFuture not implemented" in str(error):
                    raise NotSimulated("The future of a send or receive is not simulated.") from error
                raise
        work.wait()
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(results)
        return done

    return get_future


def _result(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(real)
    def result(work: Any) -> Any:
        results = _results.get(work)
        return real(work) if results is None else list(results)

    return result
