"""Collectives of ranks that are processes of their own, where tensors may have shapes and no values.

Before each collective the ranks tell each other whether they have the values that it needs: one number each. Values go
from rank to rank only where all have them; else every rank takes what it gets for unknown, and nothing is moved. It
never makes up a value, and compares nothing: whether the ranks call the same is for whoever listens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trimtab.virtual import ending
from trimtab.virtual.tensor import VIRTUAL, payload_of
from trimtab.virtual.unknown import asked, is_unknown

Named = dict[str, Any]
SENDS = frozenset(("send",))
RECEIVES = frozenset(("recv_", "recv_any_source_"))
_BARRIERS = frozenset(("barrier", "monitored_barrier_"))
_BIG = 1 << 16
"""Elements of floating-point numbers above which a message between two ranks is one byte that says so."""


def all_have_values(name: str, given: list[torch.Tensor], written: list[torch.Tensor], group: Any) -> bool:
    """Whether every rank of a group has what a collective needs: values of what it gives, memory for what it gets."""
    if name in _BARRIERS:
        return True
    here = not any(map(is_unknown, given)) and all(_has_memory(tensor) for tensor in (*given, *written))
    with torch._C.DisableTorchFunction():
        mine = torch.tensor([int(here)], device="cpu")
        theirs = [torch.empty_like(mine) for _ in range(group.size())]
    _, work = torch.ops.c10d.allgather_([theirs], [mine], group.boxed())
    dist.Work.unbox(work).wait()
    return all(bool(one) for one in theirs)


def _has_memory(tensor: torch.Tensor) -> bool:
    return not payload_of(tensor).is_meta


def written(func: Any, named: Named) -> list[torch.Tensor]:
    """The tensors that a collective writes its results to, by its schema; of a coalesced one by their names."""
    outputs = [value for key, value in named.items() if key.startswith(("output", "out"))]
    if not outputs:
        outputs = [named[key] for key in ("tensors", "tensor") if key in named]
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def forget(tensors: Iterable[torch.Tensor], op: str) -> None:
    """Results that nobody computed."""
    for tensor in tensors:
        if tensor.__class__ in VIRTUAL:
            tensor._block.unknown = True
        else:
            asked("copy", op)


def done(results: list[torch.Tensor]) -> Any:
    """The handle of a collective that is over, and what C++ (DDP's reducer) reads of it."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(results)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def answered(func: Any, named: Named) -> Any:
    """What a collective that moved nothing returns, by its schema."""
    first = next(iter(named.values()))
    returned, work = len(func._schema.returns), done(named.get("tensors", []))
    return None if returned == 0 else work if returned == 1 else (first, work)


def message(func: Any, name: str, named: Named) -> Any:
    """A send or a receive: numbers that may be known travel, of big floating-point tensors one byte does.

    What is received of floating-point numbers is unknown: the other side may not have had them.
    """
    (tensor,) = named["tensors"]
    rest = {key: value for key, value in named.items() if key != "tensors"}
    floats = tensor.is_floating_point() or tensor.is_complex()
    if name in SENDS and not floats and is_unknown(tensor):
        asked("copy", f"c10d.{name}")
    memory = _message(tensor, floats and tensor.numel() > _BIG)
    if name in RECEIVES and floats:
        forget([tensor], f"c10d.{name}")
    work = func([memory], **rest)
    ending.watch(work, [memory])
    return work


def _message(tensor: Any, short: bool) -> torch.Tensor:
    payload = payload_of(tensor)
    with torch._C.DisableTorchFunction():
        if short:
            return torch.zeros(1, dtype=torch.uint8, device="cpu")
        if payload.is_meta:
            return torch.zeros(payload.shape, dtype=payload.dtype, device="cpu")
    return payload
