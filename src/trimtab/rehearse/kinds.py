"""What a rehearsed program keeps on its GPUs: weights, gradients, an optimizer's state, a cache of keys and values.

The ledger of a virtual GPU sees blocks of bytes; which of them is what, only the program's modules and optimizers know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.virtual.state import HOST
from trimtab.virtual.tensor import VIRTUAL


def tell(value: Any, kind: str) -> None:
    """Tell the ledgers what a tensor, or all that a container or a plain object holds, is."""
    for tensor in tensors_in(value):
        device = tensor._slot
        if device.index != HOST:
            device.ledger.tell(tensor, kind)


def tensors_in(value: Any, deep: int = 4) -> Iterator[Any]:
    """The virtual tensors in a value: of a container, of a tensor that is made of others, of a plain object."""
    if value.__class__ in VIRTUAL:
        yield value
    elif isinstance(value, torch.Tensor):
        for part in _parts(value):
            yield from tensors_in(part, deep)
    elif deep and value is not None and not isinstance(value, str | bytes | int | float):
        for part in _held(value):
            yield from tensors_in(part, deep - 1)


def _parts(tensor: Any) -> Iterable[Any]:
    """What a tensor is made of: the shard of a DTensor, the codes and scales of a quantized one."""
    local = tensor.__dict__.get("_local_tensor")
    if local is not None:
        return (local,)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else ()


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return value
    return list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else ()


def tell_weights(module: nn.Module) -> None:
    """A module's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        tell(tensor, "weights")


def tell_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """The gradients that are there."""
    for parameter in parameters:
        if parameter.grad is not None:
            tell(parameter.grad, "gradients")


def tell_state(optimizer: Any) -> None:
    """What an optimizer keeps for its parameters."""
    for kept in getattr(optimizer, "state", {}).values():
        tell(kept, "optimizer")
