"""Sparse tensors where shapes alone are rehearsed: the places of what is not zero are known, the numbers there are not.

A sparse tensor keeps its places, so that how many there are stays exact (also when equal ones are joined), over
stand-ins for its numbers. What is dense and made from one has a shape only: no stand-in is given out as a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual.plans import VIEW, Plan
from trimtab.virtual.tensor import LAYOUTS

_META = torch.device("meta")
_MAKERS = frozenset(
    f"aten::{name}"
    for name in ("_sparse_coo_tensor_with_dims_and_tensors", "_sparse_coo_tensor_unsafe", "sparse_coo_tensor")
)


def concerns(plan: Plan, payloads: Any) -> bool:
    """Whether an operation makes a sparse tensor, or is given one."""
    return plan.name in _MAKERS or (
        bool(LAYOUTS)
        and any(isinstance(value, Tensor) and value.layout is not torch.strided for value in payloads)
    )


def carry(plan: Plan, func: Any, payloads: Any, named: Any, forget: Callable[[], None]) -> Any:
    """The operation, with as few numbers as its places need."""
    if plan.writes and payloads[0].layout is torch.strided:
        forget()
        return payloads[0]
    if plan.name == "aten::sparse_mask":
        return _at(payloads[1])
    if plan.name in _MAKERS:
        payloads = [_ones(value) for value in payloads]
    elif any(isinstance(value, Tensor) and value.is_meta for value in payloads):
        payloads = [_whole(value) for value in payloads]
    made = func(*payloads, **named)
    return _without_values(made) if plan.kind == VIEW or made.__class__ is Tensor else made


def _at(mask: Tensor) -> Tensor:
    """A sparse tensor with the places of another."""
    made = torch.sparse_coo_tensor(
        mask._indices(), torch.ones_like(mask._values()), mask.shape, check_invariants=False
    )
    return made._coalesced_(mask.is_coalesced())


def _ones(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_meta:
        return torch.ones(value.shape, dtype=value.dtype, device="cpu")
    return value


def _whole(value: Any) -> Any:
    """A tensor as a shape, as if all of it were there: what is dense and made from it has the same shape."""
    return torch.empty(value.shape, dtype=value.dtype, device=_META) if isinstance(value, Tensor) else value


def _without_values(made: Any) -> Any:
    if isinstance(made, Tensor) and made.layout is torch.strided and made.is_floating_point():
        return torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=_META)
    return made
