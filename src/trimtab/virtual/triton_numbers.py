"""The arithmetic and the memory of Triton's interpreter: many programs of a grid at once, and numbers that numpy lacks.

Triton's own interpreter runs one program after the other, adds the bits of bfloat16 and float8, which numpy does not
know, and reads any address that a kernel makes up. Here every array has a first dimension for the programs that run
together (or 1, where they agree), narrow types are computed in 32 bits and rounded, an access outside the tensors of
the launch is left out and remembered, and the work is counted, so that a launch which takes minutes is given up.
Imported only when a kernel is launched: Triton may not be there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_CALL = 30_000
"""What one operation of the interpreter costs however small, in nanoseconds; each element costs one or more."""
_PADDING = 512
"""CUDA's allocator hands out multiples of this: a read in the rest of a block fails nowhere."""
_NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}
_BITS = {1: torch.uint8, 2: torch.int16}


class Unsupported(Exception):
    """The interpreter has no such operation."""


class TooLong(Exception):
    """The launch would take longer than a rehearsal waits for it."""


class Diverged(Exception):
    """Programs that run together want to go on in different ways: by these keys, one for each."""

    def __init__(self, keys: Any) -> None:
        super().__init__("programs go different ways")
        self.keys = keys


def agreed(data: Any) -> Any:
    """The one value of a scalar on which all programs agree."""
    first = data.flat[0]
    if data.size > 1 and not bool((data == first).all()):
        raise Diverged(data.reshape(-1))
    return first.item()


def is_narrow(handle: Any) -> bool:
    """Whether the array holds the bits of numbers that numpy does not know."""
    return handle.dtype.scalar in _NARROW and handle.data.dtype.kind == "u"


def wide(handle: Any) -> Any:
    """The numbers of a handle, in a type that numpy knows."""
    data = handle.data
    if not is_narrow(handle):
        return data
    if data.dtype == np.uint16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    plain = torch.from_numpy(np.array(data))
    return plain.view(_NARROW[handle.dtype.scalar]).float().numpy()


def narrowed(data: Any, dtype: Any) -> Any:
    """Numbers as the array that the interpreter keeps for a type: rounded to nearest, ties to even."""
    target = _NARROW.get(dtype)
    if target is None:
        return np.asarray(data).astype(interpreter._get_np_dtype(dtype), copy=False)
    rounded = torch.from_numpy(np.array(data, dtype=np.float32)).to(target)
    bits = rounded.view(_BITS[rounded.element_size()]).numpy()
    return bits.view(np.uint16) if bits.itemsize == 2 else bits


def as_tensor(data: Any, dtype: Any) -> Any:
    """A value of the language: a block, or a scalar where there is no dimension but that of the programs."""
    shape = list(data.shape[1:])
    return tl.core.tensor(TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)


def alike(*arrays: Any) -> list[Any]:
    """Arrays in one shape: scalars of the programs stand for all elements."""
    rank = max(array.ndim for array in arrays)
    return list(np.broadcast_arrays(*(a.reshape(a.shape + (1,) * (rank - a.ndim)) for a in arrays)))


class Memory:
    """The storages that a launch was given. It never lets the interpreter touch anything else."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._starts = np.array([start for start, _ in self._spans], dtype=np.uint64)
        self._ends = np.array([end for _, end in self._spans], dtype=np.uint64)
        self._padded = np.array([-(-end // _PADDING) * _PADDING for _, end in self._spans], dtype=np.uint64)
        self.strayed: str | None = None
        """The first line that went beyond, and what it did."""

    def within(self, pointers: Any, mask: Any, size: int, deed: str) -> Any:
        """The mask, less what lies outside."""
        live = pointers[mask]
        if not live.size:
            return mask
        low, high = int(live.min()), int(live.max()) + size
        if any(start <= low and high <= end for start, end in self._spans):
            return mask
        good = padded = np.zeros(pointers.shape, dtype=bool)
        if self._spans:
            at = np.searchsorted(self._starts, pointers, side="right").astype(np.int64) - 1
            last = pointers + np.uint64(size)
            good = mask & (at >= 0) & (last <= self._ends[at])
            padded = mask & (at >= 0) & (last <= self._padded[at])
        if self.strayed is None and bool((mask & ~padded).any()):
            self.strayed = f"it {deed} outside the tensors that it was given, at {_line()}"
        return good


def _line() -> str:
    """The line of the kernel that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "__to_tensor__" not in frame.f_globals:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Arithmetic(interpreter.InterpreterBuilder):
    """What carries out the operations on numbers; those on memory and shapes are in triton_memory.py."""

    def __init__(self, memory: Memory, nanoseconds: int) -> None:
        super().__init__()
        self.memory = memory
        self.left = nanoseconds
        self.widest = 1
        """The most elements that an operation had for one program."""
        self.together = 1
        """How many programs run together."""

    def __getattr__(self, name: str) -> Any:
        narrow = next((dtype for dtype in _NARROW if name == f"get_{dtype.name}"), None)
        if narrow is not None:
            return lambda value: TensorHandle(narrowed(np.array([value]), narrow), narrow)
        if name.startswith("create_"):
            raise Unsupported(f"Triton's interpreter lacks {name.removeprefix('create_')}")
        raise AttributeError(name)

    def spend(self, data: Any, times: int = 1) -> None:
        """Count an operation."""
        self.left -= _CALL + times * data.size
        if data.size > self.widest * data.shape[0]:
            self.widest = data.size // data.shape[0]
        if self.left < 0:
            raise TooLong("to interpret it takes too long")

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        self.spend(lhs.data if lhs.data.size > rhs.data.size else rhs.data)
        if not is_narrow(lhs) and not is_narrow(rhs):
            return super().binary_op(lhs, rhs, op)
        made, dtype = op(wide(lhs), wide(rhs)), lhs.dtype.scalar
        return TensorHandle(made if made.dtype == bool else narrowed(made, dtype), dtype)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Callable[..., Any]) -> Any:
        self.spend(lhs.data)
        if op is np.where or not is_narrow(other):
            return super().ternary_op(lhs, rhs, other, op)
        dtype = other.dtype.scalar
        return TensorHandle(narrowed(op(wide(lhs), wide(rhs), wide(other)), dtype), dtype)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        self.spend(arg.data, 4)
        return TensorHandle(narrowed(op(wide(arg)), arg.dtype.scalar), arg.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        self.spend(z.data)
        return TensorHandle(narrowed(wide(x) * wide(y) + wide(z), z.dtype.scalar), z.dtype.scalar)

    def create_rsqrt(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda data: 1 / np.sqrt(data))

    def create_erf(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda data: torch.erf(torch.from_numpy(np.array(data))).numpy())

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        one, two, added = wide(a), wide(b), wide(d)
        self.spend(one, max(1, two.shape[-1] // 4))
        kind = added.dtype if added.dtype.kind != "f" or added.itemsize > 2 else np.dtype(np.float32)
        made = np.matmul(one.astype(kind), two.astype(kind)) + added
        return TensorHandle(narrowed(made, d.dtype.scalar), d.dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        self.spend(src.data)
        dtype = dst_type.scalar
        return TensorHandle(narrowed(wide(src), dtype), dtype)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        nearest = rounding_mode is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
        known = all(t in _NARROW or t.primitive_bitwidth >= 16 for t in (src.dtype.scalar, dst_type.scalar))
        if nearest and known:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_assert(self, condition: Any, message: str) -> None:
        """Compiled only where Triton is asked to debug."""

    def create_assume(self, condition: Any) -> None:
        """A hint to the compiler."""

    def create_print(self, *_: Any) -> None:
        """What a kernel prints says nothing of the program."""
