"""What cuDNN takes for a convolution. Which of its kernels it chooses is its own affair: so much take the usual ones.

They work on channels that lie together, in whole pieces of 16 bytes: operands that lie otherwise are copied. The
gradient of the weight is added up in 32 bits by blocks that fill the GPU. The rules are those of 400 cases on an H200
(benchmarks/cudnn_memory.py); where cuDNN has several kernels for one kind of case, the one that takes more.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from trimtab.virtual.course import NEXT, Taken
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.reduce_memory import multiprocessors
from trimtab.virtual.state import VirtualDevice

_FEW = 4
"""So many channels or fewer are read as they lie, while the sums are short."""
_SHORT = 128
_TILE = 128
"""Rows and columns of a gradient that one block computes; half as many where it has no more."""
_WHOLE = 32
"""In 32 bits the kernels for channels that lie together want whole runs of so many."""
_LARGE = 2**28
"""Elements of a source in 16 bits from which even a product of matrices is made of pixels whose channels lie together.
Seen on an H200 from 10 x 384 x 512 x 512 on (a U-Net's shortcut) and not up to 2**25: where it begins is not known."""


class _Case(NamedTuple):
    """A convolution by what its kernels are chosen by; a transposed one by that of which it is the way back."""

    element: int
    planes: int
    """Dimensions of a picture, a line or a volume."""
    channels: int
    """Of the source."""
    made: int
    """Channels of the result."""
    groups: int
    points: bool
    """Whether no neighbours are added."""
    strided: bool
    apart: bool
    """Whether windows overlap, but not step by step."""
    together: bool
    """Whether the channels of a pixel lie next to each other."""
    source: int
    """Elements of the source, the weight and the result."""
    weight: int
    result: int
    batch: int

    @property
    def depth(self) -> int:
        """Numbers that are added up for each of the result."""
        return self.weight // max(self.made, 1)

    @property
    def alone(self) -> bool:
        return self.groups > 1 and self.groups == self.channels

    @property
    def few(self) -> bool:
        return self.channels // self.groups <= _FEW

    @property
    def direct(self) -> bool:
        """Whether a kernel reads few channels as they lie: for short sums, windows side by side or step by step."""
        if not self.few or self.depth >= _SHORT or (self.element == 2 and self.planes != 2):
            return False
        return not self.apart or self.planes == 1

    def aligned(self, channels: int) -> bool:
        return channels * self.element % 16 == 0

    def copy(self, elements: int, channels: int) -> int:
        """The bytes of a copy; in 16 bits channels are rounded up to 16 bytes."""
        if self.element == 4:
            return elements * 4
        lanes = 16 // self.element
        return elements // max(channels, 1) * -(-channels // lanes) * 16

    @property
    def source_copy(self) -> int:
        return self.copy(self.source, self.channels)

    @property
    def result_copy(self) -> int:
        return self.copy(self.result, self.made)

    @property
    def weight_copy(self) -> int:
        return self.copy(self.weight, max(self.channels // self.groups, 1))

    @property
    def copies(self) -> int:
        return self.source_copy + self.weight_copy + self.result_copy

    @property
    def padded_source(self) -> int:
        """The copy of a source whose pixels are no whole pieces of 16 bytes."""
        return 0 if self.alone or self.aligned(self.channels) else self.source_copy + self.weight_copy

    def turned(self, operand: int) -> int:
        """In 32 bits: an operand of this size and the weight, copied where channels are no whole runs."""
        whole = self.channels % _WHOLE == 0 and self.made % _WHOLE == 0
        plain = self.points or self.groups > 1 or (self.strided and not self.few)
        return 0 if whole or plain else operand + self.weight_copy

    @property
    def as_it_lies(self) -> bool:
        """Whether it is a product of matrices as they lie: all pixels of a channel in whole pieces of 16 bytes."""
        pixels = self.source // max(self.batch * self.channels, 1)
        return self.points and not self.strided and self.aligned(pixels)


def _forward_bytes(case: _Case) -> int:
    if case.alone or (case.direct and not case.together):
        return 0
    if case.together:
        return case.turned(case.source_copy) if case.element == 4 else case.padded_source
    if case.as_it_lies:
        large = case.element == 2 and case.source >= _LARGE
        return case.source_copy + case.result_copy if large else 0
    strided_points = case.points and case.element == 4
    return case.source_copy + case.weight_copy + (0 if strided_points else case.result_copy)


def _source_bytes(case: _Case) -> int:
    """For the gradient of the source."""
    if case.alone:
        return 0
    if case.together:
        wide = case.copies if case.few else case.result_copy
        return case.turned(wide) if case.element == 4 else case.padded_source
    return 0 if case.as_it_lies or (case.direct and case.element == 4) else case.copies


def _weight_bytes(case: _Case, device: VirtualDevice) -> int:
    """For the gradient of the weight."""
    parts = _parts(case, device)
    if case.together:
        if case.element == 2:
            return case.padded_source + (0 if case.aligned(case.made) else case.result_copy) + parts
        if case.groups > 1:
            channels = case.channels // case.groups
            return (case.source + case.result) // channels * -(-channels // 4) * 16 + parts
        volumes = case.planes == 3 and case.channels < 2 * _WHOLE
        return (case.copies if volumes or (case.few and not case.direct) else 0) + parts
    if case.alone or (case.direct and case.element == 4 and case.planes < 3):
        return 0
    by_sample = case.batch * case.weight * 4
    return min(by_sample, case.copies + parts) if case.as_it_lies else case.copies + parts


def _parts(case: _Case, device: VirtualDevice) -> int:
    """Sums in 32 bits that blocks, as many as the GPU has room for at once, leave to be added up."""
    blocks = multiprocessors(device)
    if case.alone:
        return 4 * blocks * case.weight * 4
    rows, columns = case.made // case.groups, case.depth
    plain = case.points and case.together and not case.strided  # a product of matrices
    side = _TILE // 2 if min(rows, columns) <= _TILE // 2 and not plain else _TILE
    tiles = -(-rows // side) * -(-columns // side) * case.groups
    if plain:
        blocks = blocks * case.element // 4
        return min(blocks, 4 * blocks // tiles) * case.weight * 4
    pixels = case.result // max(case.made, 1)
    return min(blocks // tiles * tiles or blocks, tiles * -(-pixels // _TILE)) * side * side * 4


def _together(tensor: Tensor) -> bool:
    """As ATen asks it: a lone channel that lies either way counts as the usual one."""
    if tensor.dim() not in (4, 5) or not tensor.stride(1):
        return False
    least = 0
    for at in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, step = tensor.size(at), tensor.stride(at)
        if not size or step < least or (not at and least == tensor.stride(1)):
            return False
        least = step * max(size, 1)
    return True


def _each(steps: Any, weight: Tensor) -> list[int]:
    return list(steps) if len(steps) > 1 else list(steps) * (weight.dim() - 2)


def _case(source: Tensor, weight: Tensor, result: Any, args: Args, transposed: bool) -> _Case:
    """`args`: from the stride on."""
    made = math.prod(result)
    given = source.numel(), source.size(1), made, result[1]
    if transposed:  # the gradient of a convolution the other way round: what it makes is the other's source
        given = given[2:] + given[:2]
    return _Case(
        element=source.element_size(),
        planes=source.dim() - 2,
        channels=given[1],
        made=given[3],
        groups=args[5],
        points=math.prod(weight.shape[2:]) == 1,
        strided=any(step > 1 for step in args[0]),
        apart=any(
            1 < step < size for step, size in zip(_each(args[0], weight), weight.shape[2:], strict=True)
        ),
        together=_together(source) or _together(weight),
        source=given[0],
        weight=weight.numel(),
        result=given[2],
        batch=source.size(0),
    )


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
    if _is_point(result):
        return 0
    case = _case(source, weight, result, args[3:9], args[6])
    return _source_bytes(case) if args[6] else _forward_bytes(case)


def _backward(plan: Plan, args: Args, kwargs: Kwargs, device: VirtualDevice) -> Taken:
    """The gradient of the source and what it takes; when that is given back, the gradient of the weight and its own."""
    grad, source, weight = args[:3]
    wanted, transposed = args[10], args[7]
    case = _case(source, weight, grad.shape, args[4:10], transposed)
    first = second = 0
    if wanted[0] and not _is_point(grad.shape):
        first = _forward_bytes(case) if transposed else _source_bytes(case)
    if wanted[1]:
        second = _weight_bytes(case, device)
    return (NEXT, first, -first, NEXT, second, -second)


RULES = {"convolution": _forward, "convolution_backward": _backward}
"""The former takes it when its result is there."""
