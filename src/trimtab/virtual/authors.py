"""Operations that a program writes in Python: which function is their kernel on CUDA.

Two ways lead there: `torch.library.custom_op`, whose definitions torch keeps, and `Library.impl` with what builds on it
(`torch.library.impl`, `register_kernel`), of which torch keeps nothing that Python could ask; it is noted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from trimtab.virtual.state import Machine, Patch

_KEYS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Under which a kernel for CUDA is found, the nearest first."""
_noted: dict[str, dict[str, Callable[..., Any]]] = {}


def patches(machine: Machine) -> list[Patch]:
    return [(torch.library.Library, "impl", _noting(torch.library.Library.impl))]


def _noting(native: Callable[..., Any]) -> Callable[..., Any]:
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: Any = "", **options: Any) -> Any:
        key = dispatch_key if isinstance(dispatch_key, str) else dispatch_key.name
        key = key or self.dispatch_key
        if key in _KEYS and callable(fn) and not options.get("with_keyset"):
            name = op_name.name() if isinstance(op_name, torch._ops.OpOverload) else str(op_name)
            name = name.split("::")[-1].removesuffix(".default")
            _noted.setdefault(f"{self.ns}::{name}", {})[key] = fn
        return native(self, op_name, fn, dispatch_key, **options)

    return impl


def kernel_on_cuda(func: Any) -> Callable[[], Any] | None:
    """What gives the function of an operation when it is to run, None for operations that are not written in Python."""
    if (definition := OPDEFS.get(func._schema.name)) is not None:
        return lambda: definition._backend_fns.get("cuda") or definition._backend_fns.get(None)
    if (known := _noted.get(func.name())) is not None:
        return lambda: next((known[key] for key in _KEYS if key in known), None)
    return None
