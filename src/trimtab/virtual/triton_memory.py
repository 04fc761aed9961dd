"""Loads, stores and shapes of Triton's interpreter, for many programs of a grid at once.

Arrays are as triton_numbers.py says: the first dimension is that of the programs. What is stored can be taken back,
since programs that turn out to go different ways are run again apart. Imported only when a kernel is launched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from trimtab.virtual.triton_numbers import Arithmetic, Unsupported, agreed, alike, narrowed, wide

_native = interpreter._interpreter


class Builder(Arithmetic):
    """What carries out the operations of a kernel, for one launch."""

    ids: tuple[Any, Any, Any] = (np.zeros(1, np.int32),) * 3
    """Which programs of the grid run together, along each of its axes."""
    stored: list[tuple[Any, Any, Any]]
    """What was in memory before it was written to."""

    def start(self, ids: tuple[Any, Any, Any]) -> None:
        """The next programs."""
        self.ids, self.together, self.stored = ids, len(ids[0]), []

    def take_back(self) -> None:
        """Make all stores of these programs undone."""
        for pointers, mask, before in reversed(self.stored):
            _native.store(pointers, before, mask)

    def create_get_program_id(self, axis: int) -> Any:
        return TensorHandle(self.ids[axis], tl.int32)

    # Memory

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        self.spend(ptrs.data)
        dtype = ptrs.get_element_ty()
        kind = interpreter._get_np_dtype(dtype)
        rest = np.zeros(1, kind) if other is None else other.data
        pointers, live, rest = map(
            np.ascontiguousarray, alike(ptrs.data, mask.data, rest.astype(kind, copy=False))
        )
        live = self.memory.within(pointers, live, kind.itemsize, "reads")
        return TensorHandle(_native.load(pointers, live, rest, kind).reshape(pointers.shape), dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
        # What is stored has the size that the pointer's type has, or a neighbour would be overwritten.
        kind = interpreter._get_np_dtype(ptrs.get_element_ty())
        arrays = alike(ptrs.data, mask.data, value.data.astype(kind, copy=False))
        pointers, live, data = map(np.ascontiguousarray, arrays)
        self.spend(pointers)
        live = self._keep(pointers, live, kind)
        return _native.store(pointers, data, live)

    def _keep(self, pointers: Any, live: Any, kind: Any) -> Any:
        """Remember what is about to be overwritten, where it may have to be put back."""
        live = self.memory.within(pointers, live, kind.itemsize, "writes")
        if self.together > 1:
            before = _native.load(pointers, live, np.zeros(pointers.shape, kind), kind).reshape(
                pointers.shape
            )
            self.stored.append((pointers, live, before))
        return live

    def _for_each(self, *arrays: Any) -> list[Any]:
        """Arrays in one shape, with a row for each program: what each of them does is done that often."""
        shaped = alike(*arrays)
        shape = (self.together, *shaped[0].shape[1:])
        return [np.ascontiguousarray(np.broadcast_to(array, shape)) for array in shaped]

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        pointers, compared, data = self._for_each(ptr.data, cmp.data, val.data)
        self.spend(pointers)
        if not self._keep(pointers, np.ones(pointers.shape, bool), data.dtype).all():
            raise Unsupported("an atomic access outside its tensors")
        meant = self.ir_sem_to_interpreter_sem[sem]
        found = _native.atomic_cas(pointers, compared, data, meant).reshape(pointers.shape)
        return TensorHandle(found, cmp.dtype.scalar)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        pointers, data, live = self._for_each(ptr.data, val.data, mask.data)
        self.spend(pointers, 2)
        live = self._keep(pointers, live, data.dtype)
        dtype = val.dtype.scalar
        if data.itemsize > 2:
            op, meant = self.ir_rmw_op_to_interpreter_rmw_op[rmwOp], self.ir_sem_to_interpreter_sem[sem]
            return TensorHandle(
                _native.atomic_rmw(op, pointers, data, live, meant).reshape(pointers.shape), dtype
            )
        if rmwOp != interpreter._ir.ATOMIC_OP.FADD:
            raise Unsupported("an atomic operation on 16 bits other than an addition")
        before = _native.load(pointers, live, np.zeros_like(data), data.dtype).reshape(pointers.shape)
        places, first, which = np.unique(pointers[live], return_index=True, return_inverse=True)
        added = np.zeros(places.shape, dtype=np.float32)
        np.add.at(added, which.reshape(-1), wide(TensorHandle(data, dtype))[live])
        made = narrowed(wide(TensorHandle(before, dtype))[live][first] + added, dtype)
        _native.store(places, made, np.ones(places.shape, bool))
        return TensorHandle(before, dtype)

    # Shapes

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> Any:
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        shape = tuple(ret_ty.shape)
        rows = arg.data.reshape(arg.data.shape[0], *(1 for _ in shape))
        return TensorHandle(np.broadcast_to(rows, (len(rows), *shape)), arg.dtype.scalar)

    def create_unsplat(self, arg: Any) -> Any:
        return TensorHandle(arg.data.reshape(arg.data.shape[0]), arg.dtype.scalar)

    def create_reshape(self, arg: Any, shape: Any, allow_reorder: bool) -> Any:
        return TensorHandle(arg.data.reshape(arg.data.shape[0], *shape), arg.dtype.scalar)

    def create_trans(self, arg: Any, perm: Any) -> Any:
        return TensorHandle(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar)

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        return TensorHandle(np.expand_dims(arg.data, axis + 1), arg.dtype.scalar)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        return TensorHandle(np.broadcast_to(arg.data, (arg.data.shape[0], *shape)), arg.dtype.scalar)

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        rows = max(len(lhs.data), len(rhs.data))
        parts = [np.broadcast_to(data, (rows, *data.shape[1:])) for data in (lhs.data, rhs.data)]
        return TensorHandle(np.concatenate(parts, axis=1), lhs.dtype.scalar)

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        return TensorHandle(np.stack(alike(lhs.data, rhs.data), axis=-1), lhs.dtype.scalar)

    def create_gather(self, src: Any, indices: Any, axis: int) -> Any:
        rows = max(len(src.data), len(indices.data))
        data, at = (np.broadcast_to(d, (rows, *d.shape[1:])) for d in (src.data, indices.data))
        return TensorHandle(np.take_along_axis(data, at.astype(np.int64), axis=axis + 1), src.dtype.scalar)

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        live = np.ones(1, bool) if mask is None else mask.data
        values, live = alike(data.data, live)
        made = [np.bincount(row[on], minlength=bins)[:bins] for row, on in zip(values, live, strict=True)]
        return TensorHandle(np.stack(made).astype(np.int32), tl.int32)

    # Pointers to blocks, and descriptors

    def create_make_block_ptr(
        self, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ) -> Any:
        return _Block(base, shape, strides, list(offsets), block_shape, order)

    def create_advance(self, ptr: Any, offsets: Any) -> Any:
        moved = [
            TensorHandle(at.data + by.data, at.dtype) for at, by in zip(ptr.offsets, offsets, strict=True)
        ]
        return _Block(ptr.base, ptr.shape, ptr.strides, moved, ptr.block_shape, ptr.order)

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, tensor_shape: Any, *options: Any, **named: Any
    ) -> Any:
        padding = named.get("padding", options[-1] if options else "zero")
        made = _Descriptor(base, shape, strides, tensor_shape, padding)
        size = base.dtype.element_ty.primitive_bitwidth // 8
        assert agreed(base.data) % 16 == 0, "base must be 16-byte aligned"
        assert all(agreed(s.data) * size % 16 == 0 for s in strides[:-1]), "stride must be 16-byte aligned"
        return made


def _pointers(handle: Any, offsets: Any, checked: Any) -> tuple[Any, Any]:
    """The pointers of a block whose corner is at the offsets, and which of them lie within the checked dimensions."""
    dtype = handle.base.get_element_ty()
    size = np.uint64(max(1, dtype.primitive_bitwidth // 8))
    rank = len(handle.block_shape)
    rows = max(len(one.data) for one in (handle.base, *offsets, *handle.strides, *handle.shape))

    def column(one: Any) -> Any:
        return one.data.astype(np.int64).reshape(-1, *(1 for _ in range(rank)))

    pointers = np.broadcast_to(
        handle.base.data.reshape(-1, *(1 for _ in range(rank))), (rows, *handle.block_shape)
    ).astype(np.uint64)
    inside = np.ones(pointers.shape, dtype=bool)
    for axis, length in enumerate(handle.block_shape):
        step = np.arange(length).reshape(1, *(length if other == axis else 1 for other in range(rank)))
        at = column(offsets[axis]) + step
        pointers = pointers + size * (at * column(handle.strides[axis])).astype(np.uint64)
        if axis in checked:
            inside &= (at >= 0) & (at < column(handle.shape[axis]))
    return TensorHandle(pointers, handle.base.dtype.scalar), inside


class _Block(interpreter.BlockPointerHandle):
    def materialize_pointers(self, boundary_check: Any) -> tuple[Any, Any]:
        pointers, inside = _pointers(self, self.offsets, boundary_check)
        return pointers, TensorHandle(inside, tl.int1)


class _Descriptor(interpreter.TensorDescHandle):
    def materialize_pointers(self, offsets: Any) -> tuple[Any, Any]:
        pointers, inside = _pointers(self, offsets, range(self.ndim))
        return pointers, TensorHandle(inside, tl.int1)
