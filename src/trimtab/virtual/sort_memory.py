"""What sorting takes on a GPU: CUB's radix sort, and the operations of torch that are built on it."""

from __future__ import annotations

import math

from torch import Tensor

from trimtab.virtual.course import RESULT, Taken, together
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


def _sort(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    source: Tensor = args[0]
    dim = kwargs.get("dim", next((v for v in args[1:] if v.__class__ is int), -1))
    extra = 0 if plan.name != "aten::argsort" else source.numel() * source.element_size()
    return (extra, RESULT, *_ordered(source, dim))


def _ordered(source: Tensor, dim: int) -> tuple[int, ...]:
    """Slices of up to 4096 are sorted in place; few or very long ones one after the other; others all at once."""
    if not source.dim() or not source.numel():
        return ()
    length, item, number = source.size(dim), source.element_size(), source.numel()
    if length <= 4096:
        return ()
    dense = 0 if source.stride(dim) == 1 and source.is_contiguous() else number * item
    slices = number // length
    if slices == 1 or length >= 1_000_000:
        return (dense, length * INDEX, pairs(length, item, INDEX))
    if slices < 128:
        # Sorted as a whole, each with its slice and place; then by slice.
        by_value = pairs(number, item, INDEX)
        by_slice = pairs(number, INDEX, 0, max(1, math.ceil(math.log2(slices))))
        places, keys = number * INDEX, number * item
        return (dense, places, places, keys, by_value, -by_value, -keys, by_slice)
    return (dense, number * INDEX, number * (item + INDEX))


def _unique(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """Sorted; room for as many as there are."""
    number, item = args[0].numel(), args[0].element_size()
    sorting = 0 if plan.name == "aten::unique_consecutive" else pairs(number, item, 0)
    return together(number * item, sorting)


def _permutation(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """randperm: random keys, so long that two are seldom equal, are sorted with the numbers as values."""
    number: int = args[0]
    if number < 2:
        return 0
    wide = math.ceil(math.log2(number - (6 * number**2 + 1) / (12 * math.log(0.9))))
    key = 2 if wide <= 16 else 4 if wide <= 32 else 8
    keys, sorting = number * key, pairs(number, key, INDEX, min(wide, 64))
    return (RESULT, keys, keys, number * INDEX, sorting)


def _running(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """Running sums of small whole numbers are of a copy in 64 bits."""
    source: Tensor = args[0]
    narrow = not source.is_floating_point() and not source.is_complex() and source.element_size() < INDEX
    return source.numel() * INDEX if narrow and kwargs.get("dtype") is None else 0


def _repeat(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """repeat_interleave: running sums say where each begins."""
    return args[0].numel() * INDEX if isinstance(args[0], Tensor) else 0


RULES = {
    "sort": _sort,
    "argsort": _sort,
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive"), _unique),
    "randperm": _permutation,
    **dict.fromkeys(("cumsum", "cumprod"), _running),
    "repeat_interleave": _repeat,
}
