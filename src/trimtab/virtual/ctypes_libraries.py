"""Libraries that reach the GPU past torch, by ctypes: bitsandbytes. Its operations run with their kernels for the CPU.

What it calls in its CUDA library itself is refused: a real GPU beside the virtual ones must not be touched, and without
one the library ends the process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from trimtab.virtual import state
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
            f"bitsandbytes' function {name} works on the memory of a GPU itself and is not simulated by virtual GPUs "
            "(paged optimizers are among these: rehearse with one that is not paged)"
        )

    return refuse
