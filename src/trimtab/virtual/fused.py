"""Functions that CUDA computes by one kernel and the CPU by several operations: dropout and RMS norm.

They are one operation here too, which keeps what CUDA's keeps: a mask of one byte an element, a number for each row.
Values are those of the CPU's operations bit for bit, gradients too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual.functions import Handler, call
from trimtab.virtual.tensor import VIRTUAL

_LIBRARY = torch.library.Library("trimtab_virtual", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor source, int[] shape, Tensor? weight, float? eps) -> (Tensor, Tensor)")
_LIBRARY.define(
    "rms_norm_backward(Tensor grad, Tensor source, int[] shape, Tensor? weight, Tensor factor) -> (Tensor, Tensor)"
)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(func, args, kwargs) if not args else _dropped(func, *args, **kwargs)


def _dropped(
    func: Any, input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **named: Any
) -> Any:
    if "train" in named:
        training = named.pop("train")
    inplace = bool(rest[0] if rest else named.get("inplace", False))
    if input.__class__ in VIRTUAL and training and not inplace and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, training, *rest, **named)


def native_dropout(source: Tensor, p: float, train: Any) -> tuple[Tensor, Tensor]:
    """aten::native_dropout, drawn and rounded as the CPU's `dropout` does."""
    noise = torch.empty_like(source).bernoulli_(1 - p)
    kept = noise.bool()
    return source * noise.div_(1 - p), kept


def native_dropout_backward(grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Its gradient."""
    return grad * kept.to(grad.dtype).div_(1 / scale)


def _rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(func, args, kwargs) if not args else _normed(func, *args, **kwargs)


def _normed(
    func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    alike = weight is None or (weight.dtype is input.dtype and weight.__class__ in VIRTUAL)
    shape = list(normalized_shape)
    if input.__class__ in VIRTUAL and alike and list(input.shape[-len(shape) :]) == shape and input.numel():
        return torch.ops.trimtab_virtual.rms_norm(input, shape, weight, eps)[0]
    return func(input, normalized_shape, weight, eps)


def _factor(source: Tensor, shape: list[int], eps: float | None) -> Tensor:
    wide = _wide(source)
    rest = torch.finfo(wide.dtype).eps if eps is None else eps
    return wide.pow(2).mean(_last(shape), keepdim=True).add_(rest).rsqrt()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() == 2 else tensor


def _last(shape: list[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _forward(
    source: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    return torch.rms_norm(source, shape, weight, eps), _factor(source, shape, eps)


def _backward(
    grad: Tensor, source: Tensor, shape: list[int], weight: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The steps that autograd takes back through the CPU's operations, in their order."""
    wide, grad = _wide(source), _wide(grad)
    of_weight = grad.new_empty(0)
    if weight is not None:
        rows = list(range(source.dim() - len(shape)))
        of_weight = ((grad * (wide * factor)).sum(rows) if rows else grad * (wide * factor)).to(weight.dtype)
        grad = grad * weight
    of_factor = (grad * wide).sum(_last(shape), keepdim=True)
    of_mean = -0.5 * of_factor * factor.pow(3)
    of_square = of_mean.expand(source.shape) / math.prod(shape)
    return (grad * factor + of_square * (wide * 2)).to(source.dtype), of_weight


def _forward_shapes(source: Tensor, shape: list[int], weight: Any, eps: Any) -> tuple[Tensor, Tensor]:
    rows = [*source.shape[: source.dim() - len(shape)], *[1] * len(shape)]
    return source.new_empty(source.shape), source.new_empty(rows, dtype=_sum_type(source))


def _backward_shapes(
    grad: Tensor, source: Tensor, shape: Any, weight: Any, factor: Any
) -> tuple[Tensor, Tensor]:
    return source.new_empty(source.shape), source.new_empty(0 if weight is None else weight.shape)


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.element_size() == 2 else tensor.dtype


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    source, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(source, weight, output[1])


def _go_back(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    source, weight, factor = ctx.saved_tensors
    made = torch.ops.trimtab_virtual.rms_norm_backward(grad, source, ctx.shape, weight, factor)
    return made[0], None, made[1] if weight is not None else None, None


for _name, _kernel, _shapes in (
    ("rms_norm", _forward, _forward_shapes),
    ("rms_norm_backward", _backward, _backward_shapes),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    _LIBRARY.impl(_name, _shapes, "Meta")
torch.library.register_autograd("trimtab_virtual::rms_norm", _go_back, setup_context=_keep, lib=_LIBRARY)

INSTEAD = {
    "aten::native_dropout": native_dropout,
    "aten::native_dropout_backward": native_dropout_backward,
}
"""Kernels in the place of the CPU's own."""

HANDLERS: dict[Any, Handler] = {
    nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    nn.functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
