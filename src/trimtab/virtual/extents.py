"""Where the size of each dimension of a tensor was decided: the user's line that stacked five views, say.

A dimension keeps its line through whatever leaves its size alone: batching, moving, arithmetic, a transposition, a
reshape of the others. What an operation does to dimensions is read from shapes and from the names of its arguments;
where two dimensions of one size cannot be told apart, the nearest is taken. Keeps lines only, never a tensor, and
records nothing unless the machine in force has an observer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import origin, state
from trimtab.virtual.origin import EXTENTS, Handle, Origin
from trimtab.virtual.plans import Args, Plan

Handles = tuple[Handle | Origin | None, ...]

_RESHAPES = frozenset(("aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::reshape"))
_ORDERS = frozenset(("aten::t", "aten::transpose", "aten::permute"))


def decided_at(tensor: Tensor, dimension: int) -> Origin | None:
    """The user's line that decided the size of one dimension."""
    return origin.resolve(_of(tensor)[dimension])


def _of(tensor: Tensor) -> Handles:
    kept = tensor.__dict__
    known: Handles | None = kept.get(EXTENTS)
    count = tensor.dim()
    if known is not None and len(known) == count:
        return known
    trace = kept.get(origin.ATTRIBUTE)
    return (trace.born if trace is not None else None,) * count


def follow(plan: Plan, result: Tensor, args: Args, line: Handle | bool | None = False) -> None:
    """Remember for a result which of its dimensions come from its operands, and which were decided here (`line`; False
    where nobody has looked for it yet)."""
    first = _first(args)
    if first is None or result is first or result.is_nested or not (shape := result.shape):
        return
    name = plan.name
    if name in _ORDERS:
        found: Sequence[Any] = _reordered(name, _of(first), args)
    elif shape == first.shape:
        found = _of(first)
    elif name in _RESHAPES:
        lines = _of(first)
        found = [None if at is None else lines[at] for at in _regrouped(first.shape, shape)]
    elif name == "aten::convolution":
        found = [_of(first)[0], _of(_tensors(args)[1])[0], *[None] * (len(shape) - 2)]
    else:
        found = _along(plan, first, shape, args) or _aligned(_tensors(args), shape)
    if None in found:
        here = origin.here(1) if line is False else line
        found = [known or here for known in found]
    result.__dict__[EXTENTS] = tuple(found)


def _first(args: Args) -> Tensor | None:
    """The first of the operands: most results have their dimensions from it alone."""
    one = args[0] if args else None
    if isinstance(one, Tensor) and not one.is_nested:
        return one
    return next(iter(_tensors(args)), None)


def _tensors(args: Args) -> list[Tensor]:
    """The operands; of a list only the first, with which the others agree."""
    found = []
    for value in args:
        if value.__class__ is list or value.__class__ is tuple:
            value = next((item for item in value if isinstance(item, Tensor)), None)
        if isinstance(value, Tensor) and not value.is_nested:
            found.append(value)
    return found


def _reordered(name: str, lines: Handles, args: Args) -> Sequence[Any]:
    order = list(range(len(lines)))
    if name == "aten::permute":
        order = [dimension % len(lines) for dimension in args[1]]
    elif name == "aten::transpose":
        one, other = args[1], args[2]
        order[one], order[other] = order[other], order[one]
    else:
        order.reverse()
    return [lines[dimension] for dimension in order]


@lru_cache(maxsize=4096)
def _regrouped(before: tuple[int, ...], after: tuple[int, ...]) -> list[int | None]:
    """A reshape: what stands alone on both sides, ones aside, is the same dimension; None for what is decided here."""
    old = [index for index, size in enumerate(before) if size != 1]
    new = [index for index, size in enumerate(after) if size != 1]
    found: list[int | None] = [None] * len(after)
    while old and new:
        one, other = old.pop(0), new.pop(0)
        have, want = before[one], after[other]
        if have == want:
            found[other] = one
        while have != want and (old if have < want else new):
            if have < want:
                have *= before[old.pop(0)]
            else:
                want *= after[new.pop(0)]
    return found


def _along(plan: Plan, source: Tensor, shape: tuple[int, ...], args: Args) -> list[Any] | None:
    """An operation along a dimension that it names: one is put in, taken out, or has another size afterwards."""
    if "dim" not in plan.names:
        return None
    place = plan.names.index("dim")
    named = args[place] if place < len(args) else 0
    many = named if isinstance(named, (list, tuple)) else [named]
    lines = list(_of(source))
    grown = len(shape) - len(lines)
    if any(dimension.__class__ is not int for dimension in many) or not many:
        return None
    if grown == 1 and len(many) == 1:
        lines.insert(many[0] % len(shape), None)
        sizes = list(source.shape)
        sizes.insert(many[0] % len(shape), -1)
    else:
        gone = {dimension % len(lines) for dimension in many} if lines and grown == -len(many) else set()
        sizes = [size for index, size in enumerate(source.shape) if index not in gone]
        lines = [line for index, line in enumerate(lines) if index not in gone]
    if len(lines) != len(shape):
        return None
    return [line if size == wanted else None for line, size, wanted in zip(lines, sizes, shape, strict=True)]


def _aligned(inputs: list[Tensor], shape: tuple[int, ...]) -> list[Any]:
    """Any other operation: a dimension is that of an operand which has this size at the same place from the right, else
    from the left of the first, else the only one of this size."""
    lines = [_of(tensor) for tensor in inputs]
    places = _matches(tuple([tensor.shape for tensor in inputs]), shape)
    return [None if place is None else lines[place[0]][place[1]] for place in places]


@lru_cache(maxsize=4096)
def _matches(operands: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> list[tuple[int, int] | None]:
    """For each dimension of a result the operand and the dimension of it that it comes from, if any."""
    return [_match(operands, size, index - len(shape), index) for index, size in enumerate(shape)]


def _match(operands: tuple[tuple[int, ...], ...], size: int, right: int, left: int) -> tuple[int, int] | None:
    for number, sizes in enumerate(operands):
        if -right <= len(sizes) and sizes[right] == size:
            return number, right
    if left < len(operands[0]) and operands[0][left] == size:
        return 0, left
    alike = [
        (number, place)
        for number, sizes in enumerate(operands)
        for place, have in enumerate(sizes)
        if have == size
    ]
    return alike[0] if len(alike) == 1 else None


@lru_cache(maxsize=4096)
def _resolved(handle: Handle | Origin | None) -> Origin | None:
    return origin.resolve(handle)


def carried(original: Any) -> Any:
    """A reducer of tensors between processes with which these lines travel: a loader's worker made the batch."""

    def reduce(tensor: Tensor) -> Any:
        made = original(tensor)
        machine = state.machine()
        if machine is None or machine.observer is None or not isinstance(made, tuple) or len(made) != 2:
            return made
        return rebuild, (*made, tuple(_resolved(line) for line in _of(tensor)))

    return reduce


def rebuild(maker: Any, arguments: Any, lines: tuple[Origin | None, ...]) -> Any:
    """The tensor in the process that receives it."""
    tensor = maker(*arguments)
    tensor.__dict__[EXTENTS] = lines
    return tensor


def enter() -> Any:
    """Let these lines travel with tensors that go to another process; returns the undo."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    original = reducers.get(torch.Tensor)
    if original is None:
        return lambda: None
    reducers[torch.Tensor] = carried(original)
    return lambda: reducers.__setitem__(torch.Tensor, original)
