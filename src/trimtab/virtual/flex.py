"""flex_attention, with gradients and under torch.compile: torch's own definition of it, on virtual tensors.

torch would compile it, or trace it for its gradients; here it is computed as it is defined, operation by operation,
with the whole matrix of scores in memory (as on hardware without torch.compile). Compiled and of tensors without values
it is the one kernel that torch.compile makes of it, which keeps the result and a number for each row. Never computes
with blocks that a mask leaves out.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import flex_attention
from torch.overrides import TorchFunctionMode

from trimtab.virtual import compiled, functions
from trimtab.virtual.unknown import forget, is_unknown

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
    if compiled.by_inductor() and all(map(is_unknown, args[:3])) and not _is_learnt(args[7:]):
        return _as_one_kernel(*args[:3])
    score, block_mask = _as_compiled(args[3]), (*args[4][:-1], _as_compiled(args[4][-1]))
    args = (*args[:3], score, block_mask, *args[5:])
    with functions.switched_on():
        return _MODULE.math_attention(*args, **kwargs)


def _is_learnt(captured: Any) -> bool:
    """Whether a tensor that the scores or the mask are computed with wants a gradient."""
    return any(isinstance(value, Tensor) and value.requires_grad for group in captured for value in group)


def _as_one_kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    out, sums = _OneKernel.apply(query, key, value)
    return (out, sums, sums)[: _results()]


@functools.cache
def _results() -> int:
    """How many results the operation has in this torch: the greatest score of each row came later."""
    return 3 if "max_scores" in _MODULE.math_attention.__code__.co_varnames else 2


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, sums = _operations()[0](query, key, value)
        forget(out)
        forget(sums)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        made = _operations()[1](grad, *ctx.saved_tensors)
        for tensor in made:
            forget(tensor)
        return tuple(made)


@functools.cache
def _operations() -> tuple[Any, Any]:
    """The kernels as operations, so that a compiler that is asked takes each as one."""

    @torch.library.custom_op("trimtab::flex_attention", mutates_args=())
    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, sums = made(query, key, value)
        return out, sums

    @torch.library.custom_op("trimtab::flex_attention_backward", mutates_args=())
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        row_sums = torch.empty_like(sums)
        to_query, to_key, to_value = gradients(grad, query, key, value, out, sums)
        del row_sums
        return to_query, to_key, to_value

    @forward.register_fake
    def made(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        order = sorted(range(query.dim()), key=query.stride, reverse=True)
        size = (*query.shape[:-1], value.size(-1))
        out = query.new_empty([size[at] for at in order]).permute(
            [order.index(at) for at in range(len(size))]
        )
        return out, query.new_empty(size[:-1], dtype=torch.float32)

    @backward.register_fake
    def gradients(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    return forward, backward


HANDLERS: dict[Any, functions.Handler] = {flex_attention: attend}
