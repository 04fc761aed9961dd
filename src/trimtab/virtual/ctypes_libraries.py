"""Libraries that reach the GPU past torch, by ctypes: bitsandbytes. Its operations run with their kernels for the CPU.

What it calls in its CUDA library itself is refused: a real GPU beside the virtual ones must not be touched, and without
one the library ends the process. Of its paged memory (CUDA's managed one, which moves to the host where a GPU is full,
and of which torch's allocator knows nothing) the tensors are made, and counted nowhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import state
from trimtab.virtual.pieces import aside
from trimtab.virtual.state import NotSimulated
from trimtab.virtual.tensor import VIRTUAL


def set_in_bitsandbytes(undo: ExitStack) -> None:
    """Refuse the functions of its library, but for those on the CPU."""
    module = sys.modules["bitsandbytes.cextension"]
    for name in ("BNBNativeLibrary", "ErrorHandlerMockBNBNativeLibrary"):
        owner = getattr(module, name, None)
        if owner is not None and "__getattr__" in vars(owner):
            state.replace(undo, owner, "__getattr__", _of_the_cpu(vars(owner)["__getattr__"]))


def set_in_its_modules(undo: ExitStack) -> None:
    """Refuse its quantized parameters on a GPU: classes of tensors over memory that C++ does not find there."""
    module = sys.modules["bitsandbytes.nn.modules"]
    for owner in list(vars(module).values()):
        if isinstance(owner, type) and issubclass(owner, nn.Parameter) and "__new__" in vars(owner):
            state.replace(undo, owner, "__new__", _on_the_host(owner.__new__))


def set_in_its_functions(undo: ExitStack) -> None:
    """Have paged tensors made without CUDA."""
    module = sys.modules["bitsandbytes.functional"]
    for name, new in (("get_paged", _paged), ("prefetch_tensor", _left), ("fill", _filled)):
        if hasattr(module, name):
            state.replace(undo, module, name, new)


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cuda:0") -> Any:
    index = torch.device(device).index or 0
    machine = state.machine()
    assert machine is not None  # what is set here is taken back with it
    with aside(machine.at(index)):
        made: Any = torch.zeros(shape, dtype=dtype, device=f"cuda:{index}")
    made.is_paged, made.page_deviceid = True, index
    return made


def _filled(tensor: Tensor, value: float, *_: Any, **__: Any) -> None:
    tensor.fill_(value)


def _left(*_: Any, **__: Any) -> None:
    """A prefetch moves nothing here."""


def _on_the_host(native: Callable[..., Any]) -> Any:
    @functools.wraps(native)
    def __new__(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if data.__class__ in VIRTUAL:
            raise NotSimulated(
                f"{cls.__module__}.{cls.__qualname__} on a GPU (weights that bitsandbytes has quantized) is not "
                "simulated by virtual GPUs; rehearse without quantization, with the same model in 16 bits"
            )
        return native(cls, data, *args, **kwargs)

    return staticmethod(__new__)


def _of_the_cpu(native: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattr__(self: Any, name: str) -> Any:
        return native(self, name) if "cpu" in name or name.startswith("_") else _refused(name)

    return __getattr__


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotSimulated(
            f"bitsandbytes' function {name} works on the memory of a GPU itself and is not simulated by virtual GPUs"
        )

    return refuse
