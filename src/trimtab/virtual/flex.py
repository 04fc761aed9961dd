"""flex_attention, with gradients and under torch.compile: torch's own definition of it, on virtual tensors.

torch would compile it, or trace it for its gradients; here it is computed as it is defined, operation by operation,
with the whole matrix of scores in memory (as on hardware without torch.compile). Never a block-sparse kernel.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import flex_attention
from torch.overrides import TorchFunctionMode

from trimtab.virtual import functions

# The package has the operation under the name of its module.
_MODULE: Any = sys.modules["torch._higher_order_ops.flex_attention"]


class _AsCompiled(TorchFunctionMode):
    """Reads of captured tensors as the compiled kernel makes them.

    A dimension of one element is not indexed there (`bias[batch, head, q, k]` of a bias for all batches works on
    hardware; only a kernel that is not compiled refuses). One index after the other (`bias[head][q][k]`) is one read,
    with one gradient: torch's rule for gradients of reads takes no other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}
        """By the identity of what was read: itself, from which tensor, at which place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._item(func, *args) if func is Tensor.__getitem__ else func(*args, **(kwargs or {}))

    def _item(self, func: Any, tensor: Tensor, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        _, source, before = self._read.get(id(tensor), (tensor, tensor, ()))
        place = (*before, *parts)
        if len(place) > source.dim() or not all(map(_is_one, place)):
            return func(tensor, index)
        if any(isinstance(part, Tensor) for part in place):
            made = func(source, _within(source, tuple(_as_tensor(part, source) for part in place)))
        else:
            made = func(tensor, index)
        self._read[id(made)] = made, source, place
        return made


def _is_one(part: Any) -> bool:
    """Whether an index says one place of its dimension."""
    if isinstance(part, Tensor):
        return not part.dim() and part.dtype in (torch.int32, torch.int64)
    return type(part) is int


def _as_tensor(part: Any, source: Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else torch.full((), part, dtype=torch.long, device=source.device)


def _within(tensor: Tensor, index: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        part * 0 if size == 1 else part for part, size in zip(index, tensor.shape[: len(index)], strict=True)
    )


def _as_compiled(modification: Any) -> Any:
    """The program's own function of scores or of the mask; torch pushes its modes before it calls it."""

    def call(*args: Any) -> Any:
        with _AsCompiled():
            return modification(*args)

    return call


def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The higher-order operation under torch.nn.attention.flex_attention."""
    if torch.is_autocast_enabled("cuda") and args[0].is_cuda:
        dtype = torch.get_autocast_dtype("cuda")
        args = (*(value.to(dtype) if isinstance(value, Tensor) else value for value in args[:3]), *args[3:])
    score, block_mask = _as_compiled(args[3]), (*args[4][:-1], _as_compiled(args[4][-1]))
    args = (*args[:3], score, block_mask, *args[5:])
    with functions.switched_on():
        return _MODULE.math_attention(*args, **kwargs)


HANDLERS: dict[Any, functions.Handler] = {flex_attention: attend}
