"""What a reduction takes on a GPU: blocks that share the elements of one result leave their parts in memory.

The shape of the launch is that of ATen's Reduce.cuh; where a result is not summed across a row of threads, every
thread of the row has a place of its own, so that the parts can be far larger than the operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimtab.gpu_models import nearest
from trimtab.virtual.course import RESULT, Taken, together
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.wording import words

_THREADS, _WARP = 512, 32
_FEW, _MANY = 16, 256
"""Elements that a thread sums at least, and at most before more blocks are taken."""
_PAIR = 16
"""Bytes of a value with its place, and of a running mean with its variance."""


def multiprocessors(device: VirtualDevice) -> int:
    """How many a device has."""
    return nearest(device.name, "{}.{}".format(*device.capability)).multiprocessors


@dataclass
class _Extents:
    """Dimensions as the kernel sees them: those that lie one inside the other are one."""

    sizes: list[int]
    strides: list[int]


def _joined(dims: Iterable[tuple[int, int]]) -> _Extents:
    found = _Extents([], [])
    for stride, size in sorted(dims):
        if found.sizes and stride == found.strides[-1] * found.sizes[-1]:
            found.sizes[-1] *= size
        else:
            found.sizes.append(size)
            found.strides.append(stride)
    return found


def _power(number: int, most: int) -> int:
    return 1 << (min(number, most).bit_length() - 1) if number > 0 else 1


Parts = tuple[int, int]
NONE: Parts = (0, 0)


def staged(tensor: Tensor, dims: list[int], item: int, device: VirtualDevice) -> Parts:
    """The bytes of the parts, and of the counters that say when they are complete."""
    lies = tensor.shape, tensor.stride(), tensor.storage_offset()
    return _staged(*lies, tuple(dims), item, device.name, device.capability)


@lru_cache(maxsize=4096)
def _staged(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dims: tuple[int, ...],
    item: int,
    name: str,
    capability: tuple[int, int],
) -> Parts:
    count = math.prod(shape)
    if not count:
        return NONE
    sized = [(dim, (strides[dim], size)) for dim, size in enumerate(shape) if size != 1]
    inner = _joined(lies for dim, lies in sized if dim in dims)
    outer = _joined(lies for dim, lies in sized if dim not in dims)
    outputs = math.prod(outer.sizes)
    inputs = count // outputs
    along = not outer.sizes or (bool(inner.sizes) and inner.strides[0] < outer.strides[0])
    width, height = (inputs, outputs) if along else (outputs, inputs)
    several = 1  # results that one thread computes
    if along and inner.strides[:1] == [1] and width > 128 and len(inner.sizes) == 1 and not outer.sizes:
        width //= 4
    elif not along and outer.strides[0] == 1:
        others = [offset, outer.sizes[0], *inner.strides, *outer.strides[1:]]
        several = math.gcd(4, *others)
        width //= several
    most = _THREADS // several
    wide, high = _power(width, most), _power(height, most)
    across = min(wide, _WARP)
    down = min(high, most // across)
    across = min(wide, most // down)
    step_in, step_out = (across, 1) if along else (1, across)
    if -(-inputs // step_in) < min(down * _FEW, _MANY):
        return NONE
    step_in *= down
    each = -(-inputs // step_in)
    model = nearest(name, "{}.{}".format(*capability))
    wanted = model.multiprocessors * (model.architecture.threads // (across * down))
    blocks = -(-(outputs // several) // step_out)
    if each < _MANY or blocks > wanted:
        return NONE
    shares = max(min(-(-wanted // blocks), -(-each // _FEW)), -(-each // _MANY))
    if shares <= 1:
        return NONE
    return item * outputs * shares * (1 if along else across * several), 4 * blocks


def _dims(tensor: Tensor, value: Any) -> list[int]:
    if value is None or (value.__class__ in (list, tuple) and not value):
        return list(range(tensor.dim()))
    given = value if value.__class__ in (list, tuple) else [value]
    return [dim % max(tensor.dim(), 1) for dim in given] if tensor.dim() else []


def _asked(plan: Plan, args: Args, kwargs: Kwargs, name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    at = plan.names.index(name) if name in plan.names else len(args)
    return args[at] if at < len(args) else None


def _summing(dtype: torch.dtype) -> int:
    """The bytes of a number in which numbers of a type are added up."""
    return (
        4
        if dtype in (torch.float16, torch.bfloat16, torch.float32)
        else 2 * _summing(_REAL[dtype])
        if dtype in _REAL
        else 8
    )


_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _sum(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """Sums in another type than the operand's are of a copy in that type, save 16 bits in 32."""
    tensor = args[0]
    into = _asked(plan, args, kwargs, "dtype")
    if into is None:
        into = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.int64
    short = tensor.dtype in (torch.float16, torch.bfloat16) and into is torch.float32
    copy = 0 if into is tensor.dtype or short else tensor.numel() * into.itemsize
    parts = staged(tensor, _dims(tensor, _asked(plan, args, kwargs, "dim")), _summing(into), device)
    return together(copy, *parts)


def _by(item: Callable[[Tensor], int]) -> Callable[[Plan, Args, Kwargs, VirtualDevice], Taken]:
    def rule(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
        tensor = args[0]
        parts = staged(tensor, _dims(tensor, _asked(plan, args, kwargs, "dim")), item(tensor), device)
        return together(*parts)

    return rule


def _extreme(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """The largest or smallest of all, or of a dimension with its place; of two tensors it is no reduction."""
    tensor = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        return 0
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    item = tensor.element_size() if dim is None else _PAIR
    return together(*staged(tensor, _dims(tensor, dim), item, device))


def _count(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """Where it is not nought, and the same as whole numbers, to be added up."""
    tensor = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    parts = staged(tensor, _dims(tensor, dim), 8, device)
    return (tensor.numel(), RESULT, tensor.numel() * 8, *parts)


def _equal(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    return int(args[0].numel())


def _log_of_sum(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> int:
    """The exponentials, in whole."""
    return int(int(args[0].numel()) * args[0].element_size())


AFTER = words(
    "sum mean nansum prod linalg_vector_norm norm amax amin argmax argmin var std var_mean std_mean any all max min"
)
"""Reductions: their result is there when the kernel takes its parts."""
RULES: dict[str, Callable[[Plan, Args, Kwargs, VirtualDevice], Taken]] = {
    **dict.fromkeys(words("sum mean nansum prod"), _sum),
    **dict.fromkeys(words("linalg_vector_norm norm"), _by(lambda tensor: _summing(tensor.dtype))),
    **dict.fromkeys(words("amax amin"), _by(lambda tensor: tensor.element_size())),
    **dict.fromkeys(words("argmax argmin var std var_mean std_mean"), _by(lambda tensor: _PAIR)),
    **dict.fromkeys(words("any all"), _by(lambda tensor: 1)),
    **dict.fromkeys(words("max min"), _extreme),
    "count_nonzero": _count,
    "equal": _equal,
    "logsumexp": _log_of_sum,
}
