"""What cuDNN takes for a convolution. Which of its kernels it chooses is its own affair: so much take the usual ones.

They work on channels that lie together: operands that lie otherwise are copied, input, weight and result, with their
channels rounded up in 16 bits. The gradient of the weight is added up in 32 bits, by as many groups of blocks as fill
the GPU; the exact number is cuDNN's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.reduce_memory import multiprocessors
from trimtab.virtual.state import VirtualDevice

_TILE = 128
"""Rows and columns of a gradient that one block computes."""


def _rounded(tensor: Tensor, channels: int) -> int:
    """The bytes of a copy with channels in the second dimension rounded up."""
    extra = -channels % 8 if tensor.element_size() == 2 else 0
    return tensor.numel() // max(channels, 1) * (channels + extra) * tensor.element_size()


def _together(tensor: Tensor) -> bool:
    """Whether the channels of a pixel lie next to each other."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _copies(source: Tensor, weight: Tensor, result: Any, groups: int) -> int:
    """The copies of all three; none for channels that are together, each alone, or with no neighbours to be added."""
    alone = groups > 1 and groups == source.size(1)
    if alone or _together(source) or _together(weight) or math.prod(weight.shape[2:]) == 1:
        return 0
    made = 0 if _is_point(result) else math.prod(result) * source.element_size()
    return int(_rounded(source, source.size(1)) + _rounded(weight, weight.size(1)) + made)


def _is_point(result: Any) -> bool:
    """Whether a result has one pixel: it lies either way, and the whole is a product of matrices."""
    return bool(math.prod(result[2:]) == 1)


def _result(source: Tensor, weight: Tensor, args: Args) -> list[int]:
    stride, padding, dilation, transposed, extra, groups = args[3:9]
    spatial = []
    for at, (size, kernel) in enumerate(zip(source.shape[2:], weight.shape[2:], strict=True)):
        step, pad, gap = (values[at if len(values) > 1 else 0] for values in (stride, padding, dilation))
        reach = gap * (kernel - 1)
        grown = (size - 1) * step - 2 * pad + reach + extra[at if len(extra) > 1 else 0] + 1
        spatial.append(grown if transposed else (size + 2 * pad - reach - 1) // step + 1)
    return [source.size(0), weight.size(1) * groups if transposed else weight.size(0), *spatial]


def _forward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    source, weight = args[:2]
    result = _result(source, weight, args)
    return 0 if _is_point(result) else _copies(source, weight, result, args[8])


def _backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """The gradient of the input first, then that of the weight."""
    grad, source, weight = args[:3]
    groups, wanted = args[9], args[10]
    copies = _copies(source, weight, grad.shape, groups)
    if not wanted[1]:
        return copies
    size = weight.numel() * weight.element_size()
    alone = groups > 1 and groups == source.size(1)
    points = math.prod(weight.shape[2:]) == 1
    tiles = -(-weight.size(0) // _TILE) * -(-(weight.numel() // weight.size(0)) // _TILE)
    groups_of_blocks = multiprocessors(device) // tiles
    by_samples = points and not _together(source) and not _together(weight)
    shares = source.size(0) if by_samples else groups_of_blocks if groups_of_blocks > 1 else 0
    parts = 0 if alone else shares * weight.numel() * 4
    return max(copies - size if wanted[0] else 0, copies + parts)


RULES = {"convolution": _forward, "convolution_backward": _backward}
