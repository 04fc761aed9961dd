"""What sorting takes on a GPU: CUB's radix sort, and the operations of torch that are built on it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from trimtab.gpu_models import nearest
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.state import VirtualDevice

INDEX = 8
"""Bytes of an index."""
_DIGIT = 8
"""Bits that one pass of a radix sort sorts by."""
_TILE = 8192
"""Elements that one block of it sorts at a time, in bytes of keys and values roughly: small beside the rest."""


def bits(limit: int) -> int:
    """The bits in which every number below this can be written."""
    return max(limit, 1).bit_length()


def pairs(number: int, key: int, value: int, width: int | None = None) -> int:
    """Sorting keys with values: more than one pass goes to and fro between the result and a second copy of both."""
    passes = -(-(width if width is not None else 8 * key) // _DIGIT)
    counts = passes * (1 << _DIGIT) * 4
    looked_back = -(-number * max(key, value) // (_TILE * 4)) * (1 << _DIGIT) * 4
    return (number * (key + value) if passes > 1 else 0) + counts + looked_back


def multiprocessors(device: VirtualDevice) -> int:
    major, minor = device.capability
    return nearest(device.name, f"{major}.{minor}").multiprocessors


def parts(rows: int, columns: int, grad: Tensor, device: VirtualDevice) -> int:
    """Sums of a norm's weights by parts: where rows are many and columns few, blocks of rows fill the GPU."""
    if rows <= 64 * 1024 or columns // 32 >= multiprocessors(device) // 2:
        return 0
    blocks = max(1, min(-(-rows // 256), 4 * multiprocessors(device)))
    return blocks * columns * grad.element_size()


def _sort(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    source: Tensor = args[0]
    dim = kwargs.get("dim", next((v for v in args[1:] if v.__class__ is int), -1))
    extra = 0 if plan.name != "aten::argsort" else source.numel() * source.element_size()
    return extra + ordered(source, dim)


def ordered(source: Tensor, dim: int) -> int:
    """Slices of up to 4096 are sorted in place; few or very long ones one after the other; others all at once."""
    if not source.dim() or not source.numel():
        return 0
    length, item, number = source.size(dim), source.element_size(), source.numel()
    if length <= 4096:
        return 0
    dense = 0 if source.stride(dim) == 1 and source.is_contiguous() else number * item
    slices = number // length
    if slices == 1 or length >= 1_000_000:
        return dense + length * INDEX + pairs(length, item, INDEX)
    if slices < 128:
        # Sorted as a whole, each with its slice and place; then by slice.
        by_value = number * item + pairs(number, item, INDEX)
        by_slice = pairs(number, INDEX, 0, max(1, math.ceil(math.log2(slices))))
        return dense + 2 * number * INDEX + max(by_value, by_slice)
    return dense + number * INDEX + number * (item + INDEX)


def _unique(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    source: Tensor = args[0]
    number, item = source.numel(), source.element_size()
    if plan.name == "aten::unique_consecutive":
        return number * item
    return number * item + pairs(number, item, 0)


def _permutation(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """randperm: random keys are sorted with the numbers as values."""
    number: Any = args[0]
    return 2 * number * 4 + number * INDEX + pairs(number, 4, INDEX)


RULES = {
    "sort": _sort,
    "argsort": _sort,
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive"), _unique),
    "randperm": _permutation,
}
