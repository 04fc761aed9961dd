"""What CUDA's kernels of attention take while they run, forward and backward. Which kernel it is: sdp_backends.py."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.reduce_memory import multiprocessors
from trimtab.virtual.sdp_backends import CUDNN, EFFICIENT, FLASH
from trimtab.virtual.state import VirtualDevice

_FLOAT = 4


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


def _flash(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    query, key = args[:2]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    batch, heads, rows, head = query.shape
    groups = heads // key.size(1)
    if rows == 1 and groups > 1:  # the queries of a group stand for rows
        rows, heads = groups, key.size(1)
    if dropout:
        return 0
    return _split(batch, heads, rows, key.size(2), head, device)


def _split(batch: int, heads: int, rows: int, keys: int, head: int, device: VirtualDevice) -> int:
    splits = flash_splits(batch, heads, rows, keys, head, device)
    return splits * batch * heads * rows * (_rounded_head(head) + 1) * _FLOAT if splits > 1 else 0


def _lying(tensor: Tensor) -> int:
    """The copy of a gradient or an output whose rows do not follow each other with all their heads."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _flash_backward(plan: Plan | None, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """Gradients of queries in 32 bits, a sum for each row; keys and values once for each head of a group."""
    grad, query, key, value, out = args[:5]
    batch, heads, rows, head = query.shape
    rounded = _up(rows, 128)
    sums = batch * heads * rounded * (_rounded_head(head) + 1) * _FLOAT
    return int(_lying(grad) + _lying(out) + sums + _spread(heads, key.size(1), key, value))


def _spread(heads: int, groups: int, key: Tensor, value: Tensor) -> int:
    if groups == heads:
        return 0
    return (key.numel() + value.numel()) * heads // groups * key.element_size()


def _packed_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """The same of sequences that lie one behind the other, each with room to round it up."""
    grad, query, key, value, out = args[:5]
    starts = args[6]
    if starts is None:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        grad, out = grad.transpose(1, 2), out.transpose(1, 2)
        return _flash_backward(plan, (grad, query, key, value, out), kwargs, device)
    rows, heads, head = query.shape
    rounded = rows + 128 * (starts.numel() - 1)
    sums = heads * rounded * (_rounded_head(head) + 1) * _FLOAT
    copies = sum(t.numel() * t.element_size() for t in (grad, out) if not t.is_contiguous())
    return int(copies + sums + _spread(heads, key.size(1), key, value))


def _efficient(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """Outputs of 16 bits are kept in 32 where a head is too long for registers."""
    value = args[2]
    rows = args[0].numel() // args[0].size(-1)
    wide = value.element_size() == 2 and value.size(-1) > 128
    return rows * value.size(-1) * _FLOAT if wide else 0


def _efficient_backward(plan: Plan | None, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """A sum for each row; gradients of queries are added up in 32 bits, tile by tile, each with a lock of 16 bytes."""
    grad, query, key, value = args[:4]
    batch, heads, rows, head = query.shape
    return _efficient_sums(grad, batch, heads, rows, head, key.size(2), value.size(3)) + _lying(grad)


def _efficient_sums(grad: Any, batch: int, heads: int, rows: int, head: int, keys: int, value: int) -> int:
    sums = batch * heads * rows * _FLOAT
    longest = max(head, value)
    high, wide = (64, 64) if longest <= 64 else (128, 128) if longest <= 128 else (128, 64)
    tiles = -(-rows // high) * -(-head // wide)
    each = tiles * (high * wide * _FLOAT + 16)
    if grad.element_size() == 2 and longest > 128:  # keys and values too: they do not fit into registers
        each += _up(keys, wide) * (_up(head, wide) + _up(value, wide)) * _FLOAT
    adding = sums + batch * heads * each
    # In 32 bits the rows' sums are made from a product in whole.
    return max(adding, grad.numel() * _FLOAT + 2 * sums) if grad.element_size() != 2 else adding


def _rows_backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    grad, query, key, value = args[:4]
    batch, rows, heads, head = query.shape
    copies = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    return copies + _efficient_sums(grad, batch, heads, rows, head, key.size(1), value.size(3))


def _cudnn_backward(plan: Plan | None, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """As FlashAttention's, without rounding; it takes gradients as they lie."""
    query, key, value = args[1:4]
    batch, heads, rows, head = query.shape
    return int(batch * heads * rows * (head + 1) * _FLOAT + _spread(heads, key.size(1), key, value))


def backward(backend: int, args: Args, device: VirtualDevice) -> int:
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
