"""The parts of SyncBatchNorm, for which torch has kernels on CUDA only. They see payloads; statistics are in 32 bits.

Which ranks give what is torch's own affair: it gathers, these compute. None of them asks for a value: given shapes they
tell shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _rows(tensor: Tensor) -> Tensor:
    """All that belongs to one channel in one column."""
    wide = tensor if tensor.dtype is torch.float64 else tensor.float()
    return wide.transpose(0, 1).flatten(1).t()


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    turned = tensor.transpose(0, 1)
    return rows.t().reshape(turned.shape).transpose(0, 1).contiguous().to(tensor.dtype)


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_rows(input), 0, correction=0)
    return mean, torch.rsqrt(var + eps)


def _gather_stats(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    share = (counts / counts.sum()).to(mean.dtype).unsqueeze(1)
    whole = (share * mean).sum(0)
    var = (share * (invstd**-2 - eps + (mean - whole) ** 2)).sum(0)
    count = counts.sum().double()
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_(
            (var * (count / (count - 1).clamp(min=1)).to(var.dtype)).to(running_var.dtype), momentum
        )
    return whole, torch.rsqrt(var + eps)


def _apply(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    rows = (_rows(input) - mean) * invstd
    rows = rows * weight if weight is not None else rows
    return _like(rows + bias if bias is not None else rows, input)


def _backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    grad = _rows(grad_out)
    total, product = grad.sum(0), (grad * (_rows(input) - mean)).sum(0)
    kind = weight.dtype if weight is not None else total.dtype
    return (
        total if input_g else None,
        product if input_g else None,
        (product * invstd).to(kind) if weight_g else None,
        total.to(kind) if bias_g else None,
    )


def _backward_apply(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    number = count.sum()
    slope = (_rows(input) - mean) * (invstd**2 * sum_dy_xmu / number)
    rows = (_rows(grad_out) - sum_dy / number - slope) * invstd
    return _like(rows * weight if weight is not None else rows, input)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _apply,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_apply,
}
