"""What CUDA's kernels of attention take while they run, forward and backward. Which kernel it is: sdp_backends.py."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from trimtab.virtual.course import RESULT, Made
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.reduce_memory import multiprocessors
from trimtab.virtual.sdp_backends import CUDNN, EFFICIENT, FLASH
from trimtab.virtual.state import VirtualDevice

Steps = tuple[int | Made, ...]
_FLOAT = 4
_ALIGNED = 256
"""Bytes at whose multiples cuDNN wants its workspace to begin."""


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _rounded_head(head: int) -> int:
    """FlashAttention works on heads in steps of 32, and on 256 above 192."""
    return _up(head, 32) if head <= 192 else 256


def flash_splits(batch: int, heads: int, rows: int, keys: int, head: int, device: VirtualDevice) -> int:
    """Among how many blocks FlashAttention shares the keys of one query, where queries alone leave the GPU idle."""
    units = 2 * multiprocessors(device)
    tasks = batch * heads * -(-rows // 64)
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    blocks = -(-keys // block)
    if tasks >= 0.8 * units:
        return 1
    most = min(128, units, blocks)

    def worth(number: int) -> float:
        if number > 1 and -(-blocks // number) == -(-blocks // (number - 1)):
            return 0.0
        waves = tasks * number / units
        return waves / math.ceil(waves)

    found = [worth(number) for number in range(1, most + 1)]
    best = max(found, default=0.0)
    return next((n for n, share in enumerate(found, 1) if share and share >= 0.85 * best), 1)


def _flash(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    query, key = args[:2]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    batch, heads, rows, head = query.shape
    groups = heads // key.size(1)
    if rows == 1 and groups > 1:  # the queries of a group stand for rows
        rows, heads = groups, key.size(1)
    if dropout:
        return ()
    return _split(batch, heads, rows, key.size(2), head, device)


def _split(batch: int, heads: int, rows: int, keys: int, head: int, device: VirtualDevice) -> Steps:
    """Behind the result, of each part the sums of its rows and its outputs."""
    splits = flash_splits(batch, heads, rows, keys, head, device)
    sums = splits * batch * heads * rows * _FLOAT
    return (RESULT, sums, sums * _rounded_head(head)) if splits > 1 else ()


def _lying(tensor: Tensor) -> int:
    """The copy of a gradient or an output whose rows do not follow each other with all their heads."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _flash_backward(plan: Plan | None, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    """A sum for each row, gradients of queries in 32 bits; those of keys and values once for each head of a group."""
    grad, query, key, value, out = args[:5]
    batch, heads, rows, head = query.shape
    sums = batch * heads * _up(rows, 128) * _FLOAT
    spread = _spread(heads, key.size(1), key, value)
    return (_lying(grad), _lying(out), RESULT, sums, sums * _rounded_head(head), *spread)


def _spread(heads: int, groups: int, key: Tensor, value: Tensor) -> tuple[int, ...]:
    if groups == heads:
        return ()
    return tuple(tensor.numel() * heads // groups * tensor.element_size() for tensor in (key, value))


def _packed_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    """The same of sequences that lie one behind the other, each with room to round it up."""
    grad, query, key, value, out = args[:5]
    starts = args[6]
    if starts is None:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        grad, out = grad.transpose(1, 2), out.transpose(1, 2)
        return _flash_backward(plan, (grad, query, key, value, out), kwargs, device)
    rows, heads, head = query.shape
    sums = heads * (rows + 128 * (starts.numel() - 1)) * _FLOAT
    copies = [t.numel() * t.element_size() for t in (grad, out) if not t.is_contiguous()]
    spread = _spread(heads, key.size(1), key, value)
    return (*copies, RESULT, sums, sums * _rounded_head(head), *spread)


def _efficient(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    """Outputs of 16 bits are kept in 32 where a head is too long for registers."""
    value = args[2]
    rows = args[0].numel() // args[0].size(-1)
    wide = value.element_size() == 2 and value.size(-1) > 128
    return (RESULT, rows * value.size(-1) * _FLOAT) if wide else ()


def _efficient_backward(plan: Plan | None, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    """A sum for each row; gradients of queries are added up in 32 bits, tile by tile, each with a lock of 16 bytes."""
    grad, query, key, value = args[:4]
    batch, heads, rows, head = query.shape
    sums = _efficient_sums(grad, batch, heads, rows, head, key.size(2), value.size(3))
    return (_lying(grad), RESULT, *sums)


def _efficient_sums(grad: Any, batch: int, heads: int, rows: int, head: int, keys: int, value: int) -> Steps:
    sums = batch * heads * rows * _FLOAT
    longest = max(head, value)
    high, wide = (64, 64) if longest <= 64 else (128, 128) if longest <= 128 else (128, 64)
    tiles = -(-rows // high) * -(-head // wide)
    each = tiles * (high * wide * _FLOAT + 16)
    if grad.element_size() == 2 and longest > 128:  # keys and values too: they do not fit into registers
        each += _up(keys, wide) * (_up(head, wide) + _up(value, wide)) * _FLOAT
    adding = batch * heads * each
    if grad.element_size() == 2:
        return (sums, adding, -sums, -adding)
    # In 32 bits the rows' sums are made from a product in whole, and turned.
    product = grad.numel() * _FLOAT
    return (product, sums, sums, -sums, -product, adding, -sums, -adding)


def _rows_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    grad, query, key, value = args[:4]
    batch, rows, heads, head = query.shape
    copies = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    return (copies, RESULT, *_efficient_sums(grad, batch, heads, rows, head, key.size(1), value.size(3)))


def _cudnn_backward(plan: Plan | None, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Steps:
    """As FlashAttention's in one piece, without rounding, with room to align it; it takes gradients as they lie."""
    query, key, value = args[1:4]
    batch, heads, rows, head = query.shape
    sums = batch * heads * rows * (head + 1) * _FLOAT
    return (RESULT, sums + sum(_spread(heads, key.size(1), key, value)) + _ALIGNED)


def backward(backend: int, args: Args, device: VirtualDevice) -> Steps:
    """What the backward pass of a kernel takes, of a gradient, queries, keys, values and the result."""
    rules = {FLASH: _flash_backward, EFFICIENT: _efficient_backward, CUDNN: _cudnn_backward}
    return rules[backend](None, args, {}, device)


RULES = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_backward": _packed_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_efficient_attention_forward": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_efficient_attention_backward": _rows_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
