"""The walk over the arguments of an operation: payloads for virtual tensors, the device, and how the operands mix.

Part of the hot path (dispatch.py). Says what is there and decides nothing: see rules.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trimtab.virtual import origin, sharded, state
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import VIRTUAL

_PLAIN = frozenset(
    (int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)

ALIKE, MIXED, SHAPE, STRAY, FOREIGN = range(5)
"""How operands mix: all on one device; not so; one is a meta tensor of the program's; one is a meta tensor that nobody
knows, which may not meet a virtual one; one is of a class with rules of its own."""


def walked(values: Any) -> tuple[list[Any], VirtualDevice | None, int]:
    """The values with payloads in the place of virtual tensors, the first virtual device, and how they mix."""
    found: list[Any] = []
    slot: VirtualDevice | None = None
    mix = ALIKE
    for value in values:
        cls = value.__class__
        if cls in VIRTUAL:
            found.append(value.payload)
            own = value._slot
        elif cls is list or cls is tuple:
            inner, own, inner_mix = walked(value)
            found.append(inner)
            if inner_mix > mix:
                mix = inner_mix
        else:
            if cls not in _PLAIN and isinstance(value, Tensor):
                if sharded.has_own_rules(cls):
                    mix = FOREIGN
                elif mix is not FOREIGN:
                    mix = max(mix, _shape(value)) if value.is_meta else mix or MIXED
            found.append(value)
            continue
        if own is not slot:
            if slot is None:
                slot = own
            elif own is not None:
                mix = mix or MIXED
                if slot.index == state.HOST:
                    slot = own
    return found, slot, mix


def _shape(tensor: Tensor) -> int:
    """A meta tensor that is no virtual one: the program's came through here. C++ makes others where no mode is on.

    (Where shapes only are rehearsed, payloads are such tensors.)
    """
    if state._stack and state._stack[-1].shapes:
        return SHAPE
    if tensor.__class__ is Tensor and origin.SHAPE not in tensor.__dict__:
        base = tensor._base
        if base is None or (base.__class__ is Tensor and origin.SHAPE not in base.__dict__):
            return STRAY  # it may be the program's still, come out of a sharded tensor: nothing is lost among shapes
    return SHAPE


def unwritten(args: Any, kwargs: Any) -> state.InternalError:
    """A stray met a virtual tensor: what would be read of it was never written."""
    stray = next(value for value in tree_leaves((args, kwargs)) if _is_stray(value))
    return state.InternalError(f"A tensor of {stray.numel()} elements was made without its values.")


def _is_stray(value: Any) -> bool:
    return value.__class__ is Tensor and value.is_meta and origin.SHAPE not in value.__dict__


def mark_shapes(made: Any) -> None:
    """Meta tensors that the program made: they are its own."""
    for value in tree_leaves(made):
        if value.__class__ is Tensor and value.is_meta:
            value.__dict__[origin.SHAPE] = True
