"""Rewrites devices before C++ sees them: "cuda:1" becomes what the dispatcher takes for virtual GPU 1.

Also holds the few torch functions that must be answered above autograd. Other parts add to HANDLERS; a handler
gets (func, args, kwargs) and calls `call` to go on. A handler never decides placement: that is rules.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.utils._device as default_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.virtual import faults, origin, refused, state
from trimtab.virtual.assignment import set_data
from trimtab.virtual.processes import virtual_device
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import VIRTUAL, moved, moved_to_gpu, wrap
from trimtab.virtual.wording import in_cuda_words

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
AFTER: list[Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]] = []
"""Told of every torch function with its result; empty unless a rehearsal listens."""


def listener_failed(listener: Any, error: Exception) -> None:
    """What a listener raises is no error of the program; a rehearsal says whose it is."""
    raise error


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function with its device rewritten, past any handler."""
    device = kwargs.get("device")
    target = virtual_device(device if device is not None else _default_for(func))
    if target is not None:
        kwargs = {**kwargs, "device": target}
    if kwargs.get("pin_memory") and (device is None or torch.device(device).type == "cpu"):
        # Pinned memory is ordinary memory that says it is pinned (processes.py).
        return func(*args, **{**kwargs, "pin_memory": False}).pin_memory()
    return func(*args, **kwargs)


@cache
def _constructors() -> frozenset[Any]:
    """The functions that obey torch.set_default_device and `with torch.device(…)`."""
    return frozenset(default_device._device_constructors())


def _default_for(func: Any) -> Any:
    current = getattr(default_device, "CURRENT_DEVICE", None)
    return current if current is not None and func in _constructors() else None


class VirtualFunctions(TorchFunctionMode):
    """Sees every torch function of its thread before C++ does."""

    def __init__(self, told: bool = True) -> None:
        super().__init__()
        self.listeners = AFTER if told else []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        try:
            if handler is not None:
                result = handler(func, args, kwargs or {})
            elif kwargs or getattr(default_device, "CURRENT_DEVICE", None) is not None:
                result = call(func, args, kwargs or {})
            else:
                result = func(*args)
        except (RuntimeError, TypeError) as error:
            in_cuda_words(error)
            if not refused.is_about_devices(error, args, kwargs or {}):
                raise
            result = refused.repaired(error, _again, func, args, kwargs or {})
        for listener in self.listeners:
            try:
                listener(func, args, kwargs or {}, result)
            except Exception as error:
                listener_failed(listener, error)
        return result


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return HANDLERS.get(func, call)(func, args, kwargs)


MODE = VirtualFunctions()
INSIDE = VirtualFunctions(told=False)
"""For what torch's own Python does inside an operation: it is no function that the program called."""


def switched_on() -> AbstractContextManager[object]:
    """The function mode, on in this thread: hooks and kernels written in Python run where torch has put it aside."""
    stack = torch.overrides._get_current_function_mode_stack()
    return nullcontext() if any(mode is MODE for mode in stack) else MODE


def device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """torch.device(1) means the accelerator's device 1."""
    if args and args[0].__class__ is int:
        return torch.device("cuda", args[0])
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def from_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.tensor, as_tensor and asarray: built on the CPU, then put on the device asked for."""
    asked = kwargs.get("device")
    if asked is None:
        asked = _default_for(func)
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
            made = _born(wrap(plain.detach(), slot) if slot is not None else plain)
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


def same_kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `a.data = b` is possible: between CPU and CUDA it is, between meta and CUDA it is not."""
    if any(value.is_meta for value in args) != all(value.is_meta for value in args):
        return False
    if any(value.__class__ in VIRTUAL for value in args):
        return True
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def assign_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`tensor.data = new`."""
    tensor, new = args
    if tensor.__class__ in VIRTUAL or new.__class__ in VIRTUAL:
        set_data(tensor, new)
    else:
        kind = tensor.dtype
        func(*args, **kwargs)
        machine = state.machine()
        if kind is not new.dtype and machine is not None and machine.observer is not None:
            origin.note_cast(tensor, origin.trace_of(tensor))


def assign_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`tensor.grad = grad`: both on one device. C++ would name the devices it sees."""
    tensor, grad = args
    if isinstance(grad, Tensor) and grad.device != tensor.device:
        if grad.device.type != tensor.device.type:
            message = (
                f"attempting to assign a gradient with device type '{grad.device.type}' to a tensor with device type "
                f"'{tensor.device.type}'. Please ensure that the gradient and the tensor are on the same device"
            )
        else:
            message = "assigned grad has data located on a different device"
        named = [("self", tensor), ("grad", grad)]
        faults.report("device-mismatch", message, "Tensor.grad", named, RuntimeError)
        grad = grad.to(tensor.device)
    func(tensor, grad)


HANDLERS.update(
    {
        torch.Tensor.to: moved,
        torch.Tensor.cuda: moved_to_gpu,
        torch.device: device,
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
        torch._has_compatible_shallow_copy_type: same_kind,
        torch.Tensor.grad.__set__: assign_grad,  # type: ignore[union-attr]
        torch.Tensor.data.__set__: assign_data,  # type: ignore[attr-defined]
    }
)
