"""The old types `torch.cuda.FloatTensor` and `torch.set_default_tensor_type`, and the constructor of a class of tensors
that a program has, on virtual GPUs.

Old scripts still use the types. Each stands for a dtype on the current GPU; they are never classes of tensors. A class
of a program's own stays on the CPU, a virtual tensor has a class already; but one of parameters is joined to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.virtual import origin
from trimtab.virtual.held_modes import taken_away
from trimtab.virtual.state import Machine, Patch
from trimtab.virtual.tensor import VIRTUAL, VirtualTensor, of_own_class, own_class, refuse_own_class
from trimtab.virtual.wording import LEGACY

_DTYPES = {f"torch.cuda.{name}": dtype for dtype, name in LEGACY.items()}


def _made(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As the old constructors do: uninitialised, of the sizes that are given, or from data."""
    if not args or all(isinstance(a, int) for a in args) or isinstance(args[0], torch.Size):
        return torch.empty(*(args or (0,)), dtype=dtype, device=device)
    build = torch.as_tensor if isinstance(args[0], torch.Tensor) else torch.tensor
    return build(args[0], dtype=dtype, device=device)


class _TensorType(type):
    """A type that makes tensors of one dtype on the current GPU and recognises them."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _made(args, cls.dtype, torch.device("cuda", torch.cuda.current_device()))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"


@dataclass
class _Default:
    """What `torch.Tensor(...)` makes: `set_default_device` does not concern it, `set_default_tensor_type` does."""

    on_gpu: bool = False


def _constructor(native: Any, default: _Default) -> Any:
    """torch.Tensor.__new__, also for a class of the program's: C++ wants memory for it that Python has not seen yet."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor:
            # A tensor that is given stays what it is, wherever it is.
            if not default.on_gpu or kwargs or (args and isinstance(args[0], torch.Tensor)):
                return native(cls, *args, **kwargs)
            return _made(args, torch.get_default_dtype(), torch.device("cuda", torch.cuda.current_device()))
        refuse_own_class(cls, *args[:1])
        with taken_away():
            return native(cls, *args, **kwargs)

    return staticmethod(__new__)


def _as_own_class(native: Any) -> Any:
    def _make_subclass(cls: type, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        own = own_class(cls)
        if own is not None and data.__class__ in VIRTUAL:
            return of_own_class(own, data, require_grad)
        refuse_own_class(cls, data)
        made = native(own or cls, data, require_grad, **kwargs)
        return origin.as_shape(made) if data.is_meta else made

    return staticmethod(_make_subclass)


def patches(machine: Machine) -> list[Patch]:
    native = torch.set_default_tensor_type
    default = _Default()

    def set_default_tensor_type(t: Any) -> None:
        name = _name(t)
        default.on_gpu = name.startswith("torch.cuda.")
        if default.on_gpu:
            torch.set_default_dtype(_DTYPES[name])
            torch.set_default_device("cuda")
        else:
            torch.set_default_device(None)
            native(t)

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """Tensor.type of a plain tensor, also to a GPU's type."""
        name = _name(dtype) if isinstance(dtype, (str, _TensorType)) else ""
        if name.startswith("torch.cuda."):
            return self.to("cuda", _DTYPES[name])
        return native_type(self, dtype, non_blocking, **kwargs) if dtype is not None else native_type(self)

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tensor.new of a virtual tensor: uninitialised, or from data, with its dtype and on its device."""
        if self.layout is torch.sparse_coo and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return torch.sparse_coo_tensor(*args)
        return _made(args, self.dtype, self.device)

    native_type = torch._C.TensorBase.type
    return [
        *(
            (torch.cuda, name, _TensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"}))
            for dtype, name in LEGACY.items()
        ),
        (torch, "set_default_tensor_type", set_default_tensor_type),
        (torch.Tensor, "type", type_),
        (torch.Tensor, "__new__", _constructor(torch.Tensor.__new__, default)),
        (torch.Tensor, "_make_subclass", _as_own_class(torch.Tensor._make_subclass)),
        (VirtualTensor, "new", new),
    ]
