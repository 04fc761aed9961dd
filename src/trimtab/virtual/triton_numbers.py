"""The arithmetic and the memory of Triton's interpreter, mended where a training program would meet garbage.

Triton's own interpreter computes with numpy, which has no bfloat16 and no float8 (it would add their bits), and reads
any address that a kernel makes up. Here narrow types are computed in 32 bits and rounded, an access outside the tensors
of the launch is left out and remembered, and the work is counted, so that a launch which would take minutes is given up.
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

from trimtab.virtual.wording import words

_CALL = 30_000
"""What one operation of the interpreter costs however small, in nanoseconds; as much again for each element."""
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
    """A value of the language: a block, or a scalar where there is no dimension."""
    if data.ndim:
        return tl.core.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
    return tl.core.tensor(TensorHandle(data.reshape(1), dtype), dtype)


class Memory:
    """The storages that a launch was given. It never lets the interpreter touch anything else."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._spans = spans
        self._starts = np.array([start for start, _ in spans], dtype=np.uint64)
        self._ends = np.array([end for _, end in spans], dtype=np.uint64)
        self.strayed: str | None = None
        """The first line that went beyond, and what it did."""

    def within(self, pointers: Any, mask: Any, size: int, deed: str) -> Any:
        """The mask, less what lies outside."""
        mask = np.broadcast_to(mask, pointers.shape)
        live = pointers[mask]
        if not live.size:
            return mask
        low, high = int(live.min()), int(live.max()) + size
        if any(start <= low and high <= end for start, end in self._spans):
            return mask
        good, padded = (np.zeros(pointers.shape, dtype=bool) for _ in range(2))
        if self._spans:
            at = np.searchsorted(self._starts, pointers, side="right").astype(np.int64) - 1
            end, pointers_end = self._ends[at], pointers + np.uint64(size)
            good = mask & (at >= 0) & (pointers_end <= end)
            padded = mask & (at >= 0) & (pointers_end <= end + np.uint64(_PADDING - 1) & np.uint64(-_PADDING & (1 << 64) - 1))
        if self.strayed is None and bool((mask & ~padded).any()):
            self.strayed = f"{deed} outside the tensors that it was given, at {_line()}"
        return good


def _line() -> str:
    """The line of the kernel that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "__to_tensor__" not in frame.f_globals:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Builder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """What carries out the operations of a kernel, for one launch."""

    def __init__(self, memory: Memory, nanoseconds: int) -> None:
        super().__init__()
        self.memory = memory
        self.left = nanoseconds

    def __getattr__(self, name: str) -> Any:
        narrow = next((dtype for dtype in _NARROW if name == f"get_{dtype.name}"), None)
        if narrow is not None:
            return lambda value: TensorHandle(narrowed(np.array([value]), narrow), narrow)
        if name.startswith("create_"):
            raise Unsupported(f"Triton's interpreter lacks {name.removeprefix('create_')}")
        raise AttributeError(name)

    def spend(self, elements: int) -> None:
        """Count an operation."""
        self.left -= _CALL + elements
        if self.left < 0:
            raise TooLong("to interpret it would take too long")

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        self.spend(max(lhs.data.size, rhs.data.size))
        if not is_narrow(lhs) and not is_narrow(rhs):
            return super().binary_op(lhs, rhs, op)
        made, dtype = op(wide(lhs), wide(rhs)), lhs.dtype.scalar
        return TensorHandle(made if made.dtype == bool else narrowed(made, dtype), dtype)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Callable[..., Any]) -> Any:
        self.spend(lhs.data.size)
        if op is np.where or not is_narrow(other):
            return super().ternary_op(lhs, rhs, other, op)
        dtype = other.dtype.scalar
        return TensorHandle(narrowed(op(wide(lhs), wide(rhs), wide(other)), dtype), dtype)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        self.spend(4 * arg.data.size)
        return TensorHandle(narrowed(op(wide(arg)), arg.dtype.scalar), arg.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        self.spend(z.data.size)
        return TensorHandle(narrowed(wide(x) * wide(y) + wide(z), z.dtype.scalar), z.dtype.scalar)

    def create_rsqrt(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda data: 1 / np.sqrt(data))

    def create_erf(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda data: torch.erf(torch.from_numpy(np.array(data))).numpy())

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        one, two, added = wide(a), wide(b), wide(d)
        self.spend(one.size * two.shape[-1] // 4)
        kind = added.dtype if added.dtype.kind != "f" or added.itemsize > 2 else np.dtype(np.float32)
        made = np.matmul(one.astype(kind), two.astype(kind)) + added
        return TensorHandle(narrowed(made, d.dtype.scalar), d.dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        self.spend(src.data.size)
        dtype = dst_type.scalar
        return TensorHandle(narrowed(wide(src), dtype), dtype)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        nearest = rounding_mode is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
        known = all(t in _NARROW or t.primitive_bitwidth >= 16 for t in (src.dtype.scalar, dst_type.scalar))
        if nearest and known:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
        self.spend(ptrs.data.size)
        size = interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
        good = self.memory.within(ptrs.data, mask.data, size, "reads")
        return super().create_masked_load(ptrs, TensorHandle(good, tl.int1), other, *options)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *options: Any) -> Any:
        self.spend(ptrs.data.size)
        kind = interpreter._get_np_dtype(ptrs.get_element_ty())
        good = self.memory.within(ptrs.data, mask.data, kind.itemsize, "writes")
        # What it stores has the size that the pointer's type has, or a neighbour would be overwritten.
        value = TensorHandle(np.broadcast_to(value.data.astype(kind, copy=False), ptrs.data.shape), value.dtype)
        return super().create_masked_store(ptrs, value, TensorHandle(good, tl.int1), *options)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        self.spend(ptr.data.size)
        if not self.memory.within(ptr.data, np.bool_(True), val.data.itemsize, "writes").all():
            raise Unsupported("an atomic access outside its tensors")
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self.spend(2 * ptr.data.size)
        good = TensorHandle(self.memory.within(ptr.data, mask.data, val.data.itemsize, "writes"), tl.int1)
        if val.data.itemsize > 2:
            return super().create_atomic_rmw(rmwOp, ptr, val, good, sem, scope)
        if rmwOp != interpreter._ir.ATOMIC_OP.FADD:
            raise Unsupported("an atomic operation on 16 bits")
        return self._add_in_16_bits(ptr, val, good)

    def _add_in_16_bits(self, ptr: Any, val: Any, mask: Any) -> Any:
        dtype = val.dtype.scalar
        before = super().create_masked_load(ptr, mask, None, None, None, False)
        places, first, which = np.unique(ptr.data[mask.data], return_index=True, return_inverse=True)
        added = np.zeros(places.shape, dtype=np.float32)
        np.add.at(added, which.reshape(-1), np.broadcast_to(wide(val), ptr.data.shape)[mask.data])
        made = narrowed(wide(before)[mask.data][first] + added, dtype)
        everywhere = TensorHandle(np.ones(places.shape, dtype=bool), tl.int1)
        super().create_masked_store(
            TensorHandle(places, ptr.dtype), TensorHandle(made, dtype), everywhere, None, None
        )
        return before

    def create_assert(self, condition: Any, message: str) -> None:
        """Compiled only where Triton is asked to debug."""

    def create_assume(self, condition: Any) -> None:
        """A hint to the compiler."""


LIBRARY = words(
    """
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt erf erfc
    erfinv floor ceil trunc round abs lgamma pow fmod atan2 hypot copysign nextafter isnan isinf isfinite signbit
    """
)
"""Functions of CUDA's mathematical library that torch has by the same name."""
