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
    known: Handles | None = tensor.__dict__.get(EXTENTS)
    count = tensor.dim()
    if known is not None and len(known) == count:
        return known
    born = getattr(tensor.__dict__.get(origin.ATTRIBUTE), "born", None)
    return (born,) * count


def follow(plan: Plan, result: Tensor, args: Args, line: Handle | bool | None = False) -> None:
    """Remember for a result which of its dimensions come from its operands, and which were decided here (`line`; False
    where nobody has looked for it yet)."""
    inputs = _tensors(args)
    if not inputs or result.dim() == 0 or result is inputs[0] or result.is_nested:
        return
    if plan.name in _ORDERS:
        found: Sequence[Any] = _reordered(plan.name, _of(inputs[0]), args)
    elif result.shape == inputs[0].shape:
        found = _of(inputs[0])
    elif plan.name in _RESHAPES:
        found = _regrouped(inputs[0], result.shape)
    elif plan.name == "aten::convolution":
        found = [_of(inputs[0])[0], _of(inputs[1])[0], *[None] * (result.dim() - 2)]
    else:
        found = _along(plan, inputs[0], result.shape, args) or _aligned(inputs, result.shape)
    if None in found:
        here = origin.here(1) if line is False else line
        found = [known or here for known in found]
    result.__dict__[EXTENTS] = tuple(found)


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


def _regrouped(source: Tensor, shape: Sequence[int]) -> list[Any]:
    """A reshape: what stands alone on both sides, ones aside, is the same dimension; the rest is decided here."""
    old = [(size, line) for size, line in zip(source.shape, _of(source), strict=True) if size != 1]
    new = [index for index, size in enumerate(shape) if size != 1]
    found: list[Any] = [None] * len(shape)
    while old and new:
        (have, line), index = old.pop(0), new.pop(0)
        want = shape[index]
        if have == want:
            found[index] = line
        while have != want and (old if have < want else new):
            if have < want:
                have *= old.pop(0)[0]
            else:
                want *= shape[new.pop(0)]
    return found


def _along(plan: Plan, source: Tensor, shape: Sequence[int], args: Args) -> list[Any] | None:
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


def _aligned(inputs: list[Tensor], shape: Sequence[int]) -> list[Any]:
    """Any other operation: a dimension is that of an operand which has this size at the same place from the right, else
    from the left of the first, else the only one of this size."""
    known = [(tuple(tensor.shape), _of(tensor)) for tensor in inputs]
    return [_match(known, size, index - len(shape), index) for index, size in enumerate(shape)]


def _match(known: list[tuple[tuple[int, ...], Handles]], size: int, right: int, left: int) -> Any:
    for sizes, lines in known:
        if -right <= len(sizes) and sizes[right] == size:
            return lines[right]
    sizes, lines = known[0]
    if left < len(sizes) and sizes[left] == size:
        return lines[left]
    alike = [line for sizes, lines in known for have, line in zip(sizes, lines, strict=True) if have == size]
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
