"""Collectives of one rank that stands for all of them: the others are taken to hold what this one holds.

So a gathered list is the own value so many times. What a reduction gives is not known (the operation does not say here
whether it adds): its own value stands in. It moves nothing between processes, waits for nobody and proves nothing about
what other ranks do: that needs real ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trimtab.virtual.tensor import VIRTUAL
from trimtab.virtual.unknown import asked

Named = dict[str, Any]


def init_group(native: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch's init_process_group without a rendezvous: the group says how many ranks it has, and has this one."""
    # Registers the backend of torch's own tests that connects to nobody.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    named = dict(zip(("init_method", "timeout", "world_size", "rank", "store"), args, strict=False)) | kwargs
    size, rank = _number(named, "world_size"), _number(named, "rank")
    if size < 1 or rank < 0:
        # The rendezvous itself says what is missing.
        native("gloo", *args, **kwargs)
        return
    native("fake", store=dist.HashStore(), rank=rank, world_size=size)


def _number(named: Named, name: str) -> int:
    """As torch reads it: what is given, else the variable of that name; -1 where there is neither."""
    given = named.get(name)
    return int(os.environ.get(name.upper(), "-1") if given in (None, -1) else given)


def collective(func: Any, name: str, named: Named, group: Any) -> Any:
    """What a collective leaves behind in this rank, and its handle, which is done at once."""
    carry = _EFFECTS.get(name)
    if carry is not None and group.size() > 1:
        with torch.no_grad():
            carry(named, group.rank(), group.size())
    first = next(iter(named.values()))
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(first if isinstance(first, list) else [first])
    work = torch._C._distributed_c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]
    returned = func._schema.returns
    return work if len(returned) == 1 else (first, work)


def _reduced(named: Named, rank: int, size: int) -> None:
    for tensor in named["tensors"]:
        if tensor.__class__ in VIRTUAL:
            tensor._block.unknown = True
        else:
            asked("copy", "c10d.all_reduce")


def _gathered(named: Named, rank: int, size: int) -> None:
    for outputs, given in zip(named["output_tensors"], named["input_tensors"], strict=True):
        for output in outputs:
            output.copy_(given)


def _gathered_flat(named: Named, rank: int, size: int) -> None:
    output, given = named["output_tensor"], named["input_tensor"]
    output.view(size, -1).copy_(given.reshape(1, -1).expand(size, -1))


def _scattered(named: Named, rank: int, size: int) -> None:
    for output, parts in zip(named["output_tensors"], named["input_tensors"], strict=False):
        output.copy_(parts[rank])


def _scattered_flat(named: Named, rank: int, size: int) -> None:
    output, given = named["output_tensor"], named["input_tensor"]
    output.view(-1).copy_(given.reshape(size, -1)[rank])


def _exchanged(named: Named, rank: int, size: int) -> None:
    for output, given in zip(named["output_tensors"], named["input_tensors"], strict=True):
        output.copy_(given)


_EFFECTS: dict[str, Callable[[Named, int, int], None]] = {
    "allreduce_": _reduced,
    "allreduce_coalesced_": _reduced,
    "reduce_": _reduced,
    "allgather_": _gathered,
    "gather_": _gathered,
    "_allgather_base_": _gathered_flat,
    "scatter_": _scattered,
    "reduce_scatter_": _scattered,
    "_reduce_scatter_base_": _scattered_flat,
    "alltoall_": _exchanged,
}
