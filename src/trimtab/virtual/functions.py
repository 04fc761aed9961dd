"""Rewrites devices before C++ sees them: "cuda:1" becomes what the dispatcher takes for virtual GPU 1.

Also holds the few torch functions that must be answered above autograd. Other parts add to HANDLERS; a handler
gets (func, args, kwargs) and calls `call` to go on. A handler never decides placement: that is rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.utils._device as default_device
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trimtab.virtual import faults, origin, refused, state
from trimtab.virtual.assignment import set_data
from trimtab.virtual.moving import moved, moved_to_gpu
from trimtab.virtual.processes import virtual_device
from trimtab.virtual.tensor import VIRTUAL
from trimtab.virtual.wording import in_cuda_words

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
AFTER: list[Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]] = []
"""Told of every torch function with its result, where it may be or have changed a tensor; empty unless a rehearsal
listens."""
_NO_TENSORS = frozenset((bool, int, float, torch.Size, torch.dtype, torch.device))
"""What attributes and sizes answer with: most of what is asked of tensors, and nothing was made or changed by it."""


def listener_failed(listener: Any, error: Exception) -> None:
    """What a listener raises is no error of the program; a rehearsal says whose it is."""
    raise error


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function with its device rewritten, past any handler."""
    device = kwargs.get("device")
    target = virtual_device(device if device is not None else default_for(func))
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


def default_for(func: Any) -> Any:
    """The default device that is in force for a function, if it obeys one."""
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
        if result.__class__ in _NO_TENSORS:
            return result
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


@contextmanager
def switched_off() -> Iterator[None]:
    """No function mode and no class of tensors sees what is called; a mode that is entered inside does."""
    with ExitStack() as undo:
        for _ in range(torch._C._len_torch_function_stack()):
            undo.enter_context(torch.overrides._pop_mode_temporarily())
        undo.enter_context(torch._C.DisableTorchFunctionSubclass())
        yield


def device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """torch.device(1) means the accelerator's device 1."""
    if args and args[0].__class__ is int:
        return torch.device("cuda", args[0])
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor under torch.func's wrappers, one for each vmap or grad around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def inside_transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where a tensor lies, asked inside torch.func (vmap, grad): torch's wrapper around a virtual one says meta."""
    own = unwrapped(args[0])
    if own is args[0] or own.__class__ not in VIRTUAL:
        return func(*args, **kwargs)
    return own.get_device() if func is Tensor.get_device else getattr(own, func.__self__.__name__)


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
        torch._has_compatible_shallow_copy_type: same_kind,
        torch.Tensor.grad.__set__: assign_grad,  # type: ignore[union-attr]
        torch.Tensor.data.__set__: assign_data,  # type: ignore[attr-defined]
        torch.Tensor.get_device: inside_transform,
        **{
            getattr(torch.Tensor, name).__get__: inside_transform
            for name in ("device", "is_cuda", "is_cpu", "is_meta")
        },
    }
)
