"""Results that are not one tensor: several, lists, `out=` variants, operations that change a shape in place.

Each gets its device, and shares the memory of the operand that it is a view of. Computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import memory, rules
from trimtab.virtual.assignment import sync
from trimtab.virtual.course import Course
from trimtab.virtual.memory import Block
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import VIRTUAL, wrap

# Operations with a result that CUDA leaves on the CPU, and its place among the results.
_HOST_RESULTS = {"aten::_pack_padded_sequence": 1}


_BACKWARDS = frozenset(("aten::native_dropout",))
"""Operations of which CUDA makes the last result first."""


def several(
    plan: Plan, args: Args, kwargs: Kwargs, out: Any, slot: VirtualDevice, course: Course | None = None
) -> Any:
    """Wrap any other result: several tensors, lists, out= variants, operations that change a shape in place.

    `course`: what the kernel takes for itself, some of it perhaps between one result and the next.
    """
    operands = [(n, t) for n, t in rules.operands(plan, args, kwargs) if t.__class__ in VIRTUAL]
    inputs: list[Any] = [tensor for _, tensor in operands]
    known = {id(tensor.payload): tensor for tensor in inputs}
    storages: dict[int, Block] = {}
    written = [tensor for name, tensor in operands if name in plan.writes]
    for tensor in written:
        _after_write(tensor)
    if written and plan.name.startswith("aten::_foreach"):
        # CUDA's kernels for lists do so themselves; autograd leaves it to them.
        torch.autograd.graph.increment_version(written)
    # Members of a list stay each on its own device.
    first = next((value for value in (*args, *kwargs.values()) if value.__class__ in (list, tuple)), ())
    slots = [getattr(item, "_slot", None) for item in first] if plan.foreach else []

    def one(value: Any, index: int = -1) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        where = slots[index] if 0 <= index < len(slots) else slot
        if where is None:
            return value
        if plan.writes or value.layout is not torch.strided:
            return wrap(value, where)
        if not storages and inputs:
            storages.update(_storages(inputs))
        return wrap(value, where, storages.get(value.untyped_storage()._cdata))

    if not isinstance(out, (list, tuple)):
        return one(out)
    host = _HOST_RESULTS.get(plan.name)
    made: list[Any] = []
    backwards = plan.name in _BACKWARDS
    for index, value in enumerate(reversed(out) if backwards else out):
        if index and course is not None:
            course.go_on()
        if isinstance(value, list):
            made.append([one(item, i) for i, item in enumerate(value)])
        else:
            made.append(value if index == host else one(value, index))
    if backwards:
        made.reverse()
    return tuple(made) if isinstance(out, tuple) else made


def _storages(inputs: list[Any]) -> dict[int, Block]:
    """The memory behind the operands: results of split, unbind and the like share it."""
    strided = [tensor for tensor in inputs if tensor.payload.layout is torch.strided]
    return {tensor.payload.untyped_storage()._cdata: tensor._block for tensor in strided}


def _after_write(tensor: Any) -> None:
    """An operation wrote to it, and may have changed its size and shape."""
    if tensor.payload.layout is torch.strided:
        memory.resize(tensor._block, tensor.payload.untyped_storage().nbytes())
    sync(tensor)
