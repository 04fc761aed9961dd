"""Torch functions that read Python data: tensors built from it, indices, lengths. They are handlers of functions.py.

C++ reads data past the dispatcher and makes tensors on the device that it sees, where virtual ones have no values; here
data becomes a CPU tensor first. No rule of placement is here.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import origin, state
from trimtab.virtual.functions import Handler, default_for, unwrapped
from trimtab.virtual.processes import virtual_device
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import VIRTUAL, wrap


def from_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.tensor, as_tensor and asarray: built on the CPU, then put on the device asked for."""
    asked = kwargs.get("device")
    if asked is None:
        asked = default_for(func)
    data: Any = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    virtual_data = data.__class__ in VIRTUAL
    target = virtual_device(asked)
    if target is None and not virtual_data:
        return _born(origin.as_shape(_build(func, data, args, kwargs)))
    if virtual_data and asked is None and func is not torch.tensor:
        return data.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else data  # type: ignore[no-any-return]
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad", "pin_memory")}
    slot: VirtualDevice | None = data._slot if asked is None else None
    if target is not None:
        slot = state._stack[-1].at(target.index)
    if func is torch.tensor or not isinstance(data, Tensor):
        with torch._C.DisableTorchFunction():
            if virtual_data:
                plain = data.payload.to(rest.get("dtype")).clone()
            else:
                plain = _build(func, data, args, {**rest, "device": "cpu"})
            made = _born(wrap(unwrapped(plain.detach()), slot) if slot is not None else plain)
    else:
        made = data.to(asked if slot is None else slot.meta, rest.get("dtype"))
    if kwargs.get("requires_grad"):
        made.requires_grad_(True)
    return made


def indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor[index]`, read or written: C++ makes a list of numbers a tensor on the device it sees, without values."""
    own, index = args[0], args[1]
    if own.__class__ in VIRTUAL:
        if index.__class__ is list and any(part.__class__ is list for part in index) and _is_tuple_of_lists():
            index = tuple(index)
        many = index.__class__ is tuple
        args = (own, tuple(_as_index(part) for part in index) if many else _as_index(index), *args[2:])
    return func(*args, **kwargs)


@cache
def _is_tuple_of_lists() -> bool:
    """Whether this torch takes a list of lists for several indices, as older ones do, or for one of two dimensions."""
    with warnings.catch_warnings(), torch._C.DisableTorchFunction():
        warnings.simplefilter("ignore")
        return torch.zeros(1, 1, device="cpu")[[[0], [0]]].dim() == 1


def _as_index(part: Any) -> Any:
    if part.__class__ not in (list, range) or not _are_numbers(part):
        return part
    with torch._C.DisableTorchFunction():
        made = torch.tensor(part, device="cpu")
    return made if made.dtype is torch.bool else made.long()


def _are_numbers(part: Any) -> bool:
    return all(
        _are_numbers(item)
        if item.__class__ is list
        else hasattr(item, "__index__") and not isinstance(item, Tensor)
        for item in part
    )


def ctc_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CUDA reads the lengths on the host, wherever they are; for a tensor class torch would compute with them."""
    args = (*args[:2], *(_values(value) for value in args[2:4]), *args[4:])
    lengths = {n: _values(v) for n, v in kwargs.items() if n in ("input_lengths", "target_lengths")}
    return func(*args, **{**kwargs, **lengths})


def one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As CUDA does it, by a scatter that asserts; for a tensor class torch would compare, and let every number pass."""
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if not args or args[0].__class__ not in VIRTUAL or classes <= 0 or not args[0].numel():
        return func(*args, **kwargs)
    ids = args[0]
    return torch.zeros(*ids.shape, classes, dtype=torch.int64, device=ids.device).scatter_(
        -1, ids.unsqueeze(-1), 1
    )


def unravel_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own Python makes tensors on the device here, past this mode."""
    indices = args[0] if args else kwargs["indices"]
    if indices.__class__ not in VIRTUAL:
        return func(*args, **kwargs)
    rest = {name: value for name, value in kwargs.items() if name != "indices"}
    return tuple(part.to(indices._slot.meta) for part in func(indices.cpu(), *args[1:], **rest))


def _build(func: Any, data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build from data. C++ reads tensors inside a list past the dispatcher, where virtual ones have no values."""
    options = {name: value for name, value in kwargs.items() if name not in ("data", "obj")}
    try:
        return func(data, *args[1:], **options)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        return func(_values(data), *args[1:], **options)


def _values(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_values(item) for item in data]
    return data.tolist() if isinstance(data, Tensor) else data


def new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Tensor.new_tensor: like torch.tensor, with the type and device of self."""
    own = args[0]
    data = args[1] if len(args) > 1 else kwargs["data"]
    given = {k: v for k, v in kwargs.items() if k != "data" and v is not None}
    return from_data(torch.tensor, (data,), {"device": own.device, "dtype": own.dtype, **given})


def _born(tensor: Tensor) -> Tensor:
    machine = state.machine()
    if machine is not None and machine.observer is not None:
        trace = origin.ensure_trace(tensor)
        if trace.born is None:
            trace.born = origin.here(1)
    return tensor


HANDLERS: dict[Any, Handler] = {
    torch.tensor: from_data,
    torch.as_tensor: from_data,
    torch.asarray: from_data,
    torch.Tensor.new_tensor: new_tensor,
    torch.Tensor.__getitem__: indexed,
    torch.Tensor.__setitem__: indexed,
    torch.unravel_index: unravel_index,
    nn.functional.one_hot: one_hot,
    torch.ctc_loss: ctc_loss,
    nn.functional.ctc_loss: ctc_loss,
}
