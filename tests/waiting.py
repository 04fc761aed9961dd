"""Finds the operations of a computation for which a GPU would make the host wait, on a machine without one.

They are those whose result, or its size, the host has to be told: a number read, the elements of a mask, a comparison.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TOLD = {
    "nonzero",
    "_local_scalar_dense",
    "masked_select",
    "masked_scatter_backward",
    "equal",
    "is_nonzero",
    "unique_consecutive",
    "_unique2",
}
BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Waits(TorchDispatchMode):
    """`found` has a line for each, with the place in the source that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in BY_MASK and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1] or ()
        )
        if name in TOLD or by_mask:
            calls = traceback.extract_stack()[:-1]
            where = next((c for c in reversed(calls) if "/torch/" not in c.filename), calls[-1])
            self.found.append(f"{name} at {where.filename}:{where.lineno}")
        return func(*args, **(kwargs or {}))
