"""Collectives of one rank that stands for all of them: the others are taken to hold what this one holds.

So a gathered list is the own value so many times. What a reduction gives is not known (the operation does not say here
whether it adds), and nor is what another rank sends: the own value stands in. It moves nothing between processes, waits
for nobody and proves nothing about what other ranks do: that needs real ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trimtab.virtual.met_ranks import answered, forget

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
    if carry is not None:
        with torch.no_grad():
            carry(named, group.rank(), group.size())
    return answered(func, named)


def _unknown(tensors: Any, name: str, size: int) -> None:
    """What a reduction gave; with a group of one it is what was handed in."""
    if size > 1:
        forget(tensors, name)


def _reduced(named: Named, rank: int, size: int) -> None:
    _unknown(named["tensors"], "c10d.all_reduce", size)


def _received(named: Named, rank: int, size: int) -> None:
    forget(named["tensors"], "c10d.recv")


def _gathered(named: Named, rank: int, size: int) -> None:
    # Of a gather, only the root has lists to write to.
    for outputs, given in zip(named["output_tensors"], named["input_tensors"], strict=False):
        for output in outputs:
            output.copy_(given)


def _gathered_lists(named: Named, rank: int, size: int) -> None:
    for outputs in named["output_lists"]:
        for output, given in zip(outputs, named["input_list"], strict=True):
            output.copy_(given)


def _gather_flat(output: torch.Tensor, given: torch.Tensor, size: int) -> None:
    output.view(size, -1).copy_(given.reshape(1, -1).expand(size, -1))


def _gathered_flat(named: Named, rank: int, size: int) -> None:
    _gather_flat(named["output_tensor"], named["input_tensor"], size)


def _gathered_flats(named: Named, rank: int, size: int) -> None:
    for output, given in zip(named["outputs"], named["inputs"], strict=True):
        _gather_flat(output, given, size)


def _scattered(named: Named, rank: int, size: int) -> None:
    for output, parts in zip(named["output_tensors"], named["input_tensors"], strict=False):
        output.copy_(parts[rank])


def _reduced_parts(named: Named, rank: int, size: int) -> None:
    _scattered(named, rank, size)
    _unknown(named["output_tensors"], "c10d.reduce_scatter", size)


def _reduce_flat(output: torch.Tensor, given: torch.Tensor, rank: int, size: int) -> None:
    output.view(-1).copy_(given.reshape(size, -1)[rank])
    _unknown([output], "c10d.reduce_scatter_tensor", size)


def _reduced_flat(named: Named, rank: int, size: int) -> None:
    _reduce_flat(named["output_tensor"], named["input_tensor"], rank, size)


def _reduced_flats(named: Named, rank: int, size: int) -> None:
    for output, given in zip(named["outputs"], named["inputs"], strict=True):
        _reduce_flat(output, given, rank, size)


def _exchanged(named: Named, rank: int, size: int) -> None:
    for output, given in zip(named["output_tensors"], named["input_tensors"], strict=True):
        if output.shape == given.shape:
            output.copy_(given)
        else:
            forget([output], "c10d.all_to_all")


def _exchanged_flat(named: Named, rank: int, size: int) -> None:
    output, given = named["output"], named["input"]
    if output.shape == given.shape and not named.get("output_split_sizes"):
        output.copy_(given)
    else:
        forget([output], "c10d.all_to_all_single")


_EFFECTS: dict[str, Callable[[Named, int, int], None]] = {
    "allreduce_": _reduced,
    "allreduce_coalesced_": _reduced,
    "reduce_": _reduced,
    "recv_": _received,
    "recv_any_source_": _received,
    "allgather_": _gathered,
    "allgather_coalesced_": _gathered_lists,
    "gather_": _gathered,
    "_allgather_base_": _gathered_flat,
    "allgather_into_tensor_coalesced_": _gathered_flats,
    "scatter_": _scattered,
    "reduce_scatter_": _reduced_parts,
    "_reduce_scatter_base_": _reduced_flat,
    "reduce_scatter_tensor_coalesced_": _reduced_flats,
    "alltoall_": _exchanged,
    "alltoall_base_": _exchanged_flat,
}
