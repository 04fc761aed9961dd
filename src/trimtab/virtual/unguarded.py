"""Methods of tensors that ask for a device guard of CUDA, which a build for the CPU lacks, by operations that do not.

For tensors without values that inductor takes to be on a GPU while it lowers a graph (inductor.py). Others are served
as ever.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


def unguarded() -> AbstractContextManager[Any]:
    """Within the block. The class of tensors itself stays untouched: Python would not forget that it was indexed."""
    return _Unguarded()


class _Unguarded(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func in _INSTEAD and isinstance(first, FakeTensor) and first.fake_device.type == "cuda":
            func = _INSTEAD[func]
        return func(*args, **(kwargs or {}))


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    return torch.ops.aten.copy_.default(self, source, non_blocking)


def _contiguous(self: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if self.is_contiguous(memory_format=memory_format):
        return self
    return torch.ops.aten.clone.default(self, memory_format=memory_format)


def _item(self: Tensor, index: Any) -> Any:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        place = next(n for n, part in enumerate(parts) if part is Ellipsis)
        given = sum(part is not None for part in parts) - 1
        parts[place : place + 1] = [slice(None)] * (self.dim() - given)
    made: Any = self
    picked: list[Tensor | None] = []
    for part in parts:
        if part is None:
            made = torch.ops.aten.unsqueeze.default(made, len(picked))
        elif isinstance(part, slice):
            made = torch.ops.aten.slice.Tensor(made, len(picked), part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            picked.append(part)
            continue
        else:
            made = torch.ops.aten.select.int(made, len(picked), int(part))
            continue
        picked.append(None)
    return torch.ops.aten.index.Tensor(made, picked) if any(p is not None for p in picked) else made


_INSTEAD: dict[Any, Any] = {
    Tensor.copy_: _copy,
    Tensor.contiguous: _contiguous,
    Tensor.__invert__: torch.ops.aten.bitwise_not.default,
    Tensor.__getitem__: _item,
}
