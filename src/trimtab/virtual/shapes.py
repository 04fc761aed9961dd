"""Shapes only: big tensors of floating-point numbers have a shape and no storage, small ones and whole numbers values.

What follows from a tensor without values has none either: its payload is a meta tensor (or, where it was small and had
values before, its block says that they are not to be trusted). A value that is asked of one is answered with a stand-in
and told to the machine (`asked`), with the line; the program goes on. Never makes a stand-in look like a result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import (
    batch_norm,
    hints,
    host_values,
    known_shapes,
    owed_draws,
    shape_answers,
    sparse_shapes,
)
from trimtab.virtual.plans import INPLACE, VIEW, Args, Kwargs, Plan
from trimtab.virtual.state import Machine, NotSimulated, VirtualDevice
from trimtab.virtual.tensor import VIRTUAL
from trimtab.virtual.unknown import asked, filled, hint, is_unknown
from trimtab.virtual.wording import words

FLOATS = 1 << 16
"""Floating-point tensors on a GPU with more elements than this have no storage."""
ON_HOST = 1 << 20
"""The same for uninitialised memory on the host: where a module makes its weights."""
IN_ALL = 1 << 24
"""Elements of such memory, in tensors of more than FLOATS, that are given out: many adapters are as big as a model."""
ANY = 1 << 26
"""Tensors of any type with more elements than this have no storage."""
_TRIED = 1 << 24
"""Elements of operands up to which a kernel is run on stand-ins, to learn its shapes where torch has no rule."""
_META = torch.device("meta")
_FAKE = torch._C._TorchDispatchModeKey.FAKE

_WAITED = "_c10d_functional::wait_tensor"
_UNWRITTEN = frozenset(("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"))
_INDEXED = frozenset(
    f"aten::{name}"
    for name in words("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put")
)


_FILLED = frozenset(
    f"aten::{name}" for name in words("new_zeros new_ones new_full zeros_like ones_like full_like")
)
"""What these make holds one number, whatever the tensor holds that they are made like."""


def host_slot(machine: Machine, plan: Plan, args: Args, kwargs: Kwargs) -> VirtualDevice | None:
    """The host, for a result there that has no values: of unknown operands, or big memory that nobody has written."""
    if plan.name in _UNWRITTEN:
        asked_for = kwargs.get("device")
        here = asked_for is None or asked_for.type == "cpu"
        # Under fake tensors, as torch computes shapes with, it has no storage anyway.
        elements = _made_elements(plan, args, kwargs) if here else 0
        # Locked memory is there to hold what comes from a GPU.
        big = elements > 0 if kwargs.get("pin_memory") else _too_much(machine, elements)
        return machine.host if big and torch._C._get_dispatch_mode(_FAKE) is None else None
    written = args[0] if plan.writes and args else None
    for value in _tensors(args, kwargs):
        if value is not written and is_unknown(value):
            if isinstance(written, Tensor) and written.__class__ not in VIRTUAL:
                # A program's own memory on the host: it keeps what it holds.
                asked("copy", plan.name)
                return None
            return machine.host
    return None


def _tried(func: Any, payloads: Any, named: Any) -> Any:
    """What a kernel makes of stand-ins."""
    return func(*map(_filled, payloads), **{name: _filled(value) for name, value in named.items()})


def _filled(value: Any) -> Any:
    return filled(value) if isinstance(value, Tensor) and value.is_meta else value


def keeps(payloads: Any) -> bool:
    """Whether memory of the host, which a program has made, would be written to from values that are not there."""
    target, *rest = payloads
    return not target.is_meta and any(isinstance(value, Tensor) and value.is_meta for value in rest)


def _too_much(machine: Machine, elements: int) -> bool:
    """Whether memory on the host that nobody has written is to have no storage."""
    if elements <= FLOATS:
        return False
    if elements > ON_HOST or machine.host_elements + elements > IN_ALL:
        return True
    machine.host_elements += elements
    return False


def carry(
    machine: Machine,
    slot: VirtualDevice,
    plan: Plan,
    func: Any,
    args: Args,
    kwargs: Kwargs,
    payloads: Any,
    named: Any,
) -> Any:
    """Carry out an operation on payloads of which some may have no values."""
    unknown = _any_unknown(args) or (bool(kwargs) and _any_unknown(kwargs.values()))
    if not unknown and not _grows(plan, payloads, named, args, kwargs):
        made = owed_draws.draw(plan, slot, payloads, named) if plan.draws else plan.kernel(*payloads, **named)
        return made if plan.kind in (VIEW, INPLACE) or plan.writes or plan.views else _lightened(made)
    if sparse_shapes.concerns(plan, payloads):
        return sparse_shapes.carry(plan, func, payloads, named, lambda: _forget(plan, args, kwargs))
    if plan.kind == VIEW:
        if plan.name == _WAITED and payloads[0].is_meta:
            # By torch's rule for shapes too a tensor like it, which Python takes thirty times as long to make.
            like = payloads[0]
            made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=_META)
        else:
            made = plan.binding(*payloads, **named)
        if made.dtype is torch.bool and made.is_meta:
            made._hint, made._about = hint(payloads[0]), hints.about(payloads[0])
        hints.stand_for_view(plan, payloads, named, made)
        host_values.note(plan, payloads, args, made)
        return made
    if plan.name in _FILLED and (made := _with_values(plan, func, payloads, named)) is not None:
        return made
    if unknown and (told := host_values.answer(plan, payloads, named, args)) is not None:
        return told
    if unknown and (rule := shape_answers.RULES.get(plan.name)) is not None:
        found = rule(plan, payloads, args)
        if found is not None:
            return found
    if plan.writes:
        _forget(plan, args, kwargs)
        if not func._schema.returns:
            return None
    if plan.views:
        made = plan.kernel(*payloads, **named)  # of what holds values too: they are its memory
        hints.note(plan, func, payloads, named, made)
        host_values.note(plan, payloads, args, made)
        return made
    if plan.name in _INDEXED:
        payloads = [payloads[0], shape_answers.counted(payloads[1], args[1]), *payloads[2:]]
    try:
        made = known_shapes.compute(plan, func, payloads, _of_shapes(named) if named else named)
    except NotImplementedError as error:
        by_parts = batch_norm.SUBSTITUTES.get(plan.name.removeprefix("aten::"))
        if by_parts is not None:  # of torch's operations, which have rules
            return by_parts(*known_shapes.shaped(payloads), **named)
        by_values = torch.Tag.dynamic_output_shape in func.tags
        elements = sum(value.numel() for value in _tensors(tuple(payloads), named))
        if plan.writes or by_values or elements > _TRIED:
            raise NotSimulated(
                f"{plan.name} has no rule for shapes alone: rehearse it with values (smaller, no --shapes-only)."
            ) from error
        return known_shapes.shaped(_tried(func, payloads, named))
    if made.__class__ is Tensor and made.layout is not torch.strided:
        return _tried(func, payloads, named)
    if plan.draws and slot is machine.host and isinstance(made, Tensor):
        owed_draws.owe(plan, made, named)
    hints.note(plan, func, payloads, named, made)
    host_values.note(plan, payloads, args, made)
    return made


def _of_shapes(named: Kwargs) -> Kwargs:
    """Named arguments for an operation on shapes: on no device, and without anything random."""
    changed = dict(named)
    if "device" in named:
        changed["device"] = _META
    if named.get("generator") is not None:
        changed["generator"] = None
    return changed


def _any_unknown(values: Any) -> bool:
    """Whether any of the operands has no values (`is_unknown`, which most of them decide at the first)."""
    for value in values:
        kind = value.__class__
        if kind in VIRTUAL:
            if value.payload.is_meta or value._block.unknown:
                return True
        elif (kind is list or kind is tuple) and _any_unknown(value):
            return True
    return False


def _tensors(args: Args, kwargs: Kwargs) -> Any:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif value.__class__ is list or value.__class__ is tuple:
            yield from (item for item in value if isinstance(item, Tensor))


def _made_elements(plan: Plan, args: Args, kwargs: Kwargs) -> int:
    """The elements of what a factory makes, if they are floating-point numbers; else 0."""
    size = next((value for value in args if value.__class__ in (list, tuple)), None)
    like = args[0] if args and isinstance(args[0], Tensor) else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    if plan.name == "aten::full" and kwargs.get("dtype") is None and args[1].__class__ is not float:
        return 0
    if not dtype.is_floating_point:
        return 0
    if size is None:
        return like.numel() if like is not None else 0
    return math.prod(size) if all(extent.__class__ is int for extent in size) else 0


def _grows(plan: Plan, payloads: Any, named: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operation on values would make a tensor that is to have none."""
    if plan.kind == VIEW or plan.views or plan.writes:
        return False
    if plan.factory and _made_elements(plan, args, kwargs) > FLOATS:
        return True
    found = [value for value in _tensors(tuple(payloads), named)]
    if not found:
        return False
    most = max(value.numel() for value in found)
    if plan.pointwise and len(found) > 1:
        most = max(most, math.prod(torch.broadcast_shapes(*(value.shape for value in found))))
    return most > ANY or (most > FLOATS and any(v.is_floating_point() for v in found))


def _with_values(plan: Plan, func: Any, payloads: Any, named: Any) -> Tensor | None:
    """A small tensor that is filled with one number: it has values, also one made like a tensor that has none."""
    like = payloads[0]
    fresh = plan.name.startswith("aten::new_")
    elements = math.prod(payloads[1]) if fresh else like.numel()
    if elements > (FLOATS if (named.get("dtype") or like.dtype).is_floating_point else ANY):
        return None
    if like.is_meta:
        size, stride = ((0,), (1,)) if fresh else (like.size(), like.stride())
        like = torch.empty_strided(size, stride, dtype=like.dtype, device="cpu")
    made: Tensor = func(like, *payloads[1:], **named)
    return made


def _lightened(made: Any) -> Any:
    """A result, without storage where it is big and of floating-point numbers."""
    if made.__class__ is Tensor:
        if made.is_floating_point() and made.numel() > FLOATS and made.layout is torch.strided:
            return torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=_META)
        return made
    if isinstance(made, (list, tuple)):
        kept = [_lightened(value) for value in made]
        return tuple(kept) if isinstance(made, tuple) else kept
    return made


def _forget(plan: Plan, args: Args, kwargs: Kwargs) -> None:
    """What is written to from unknown values is unknown."""
    for name, value in (*zip(plan.names, args, strict=False), *kwargs.items()):
        if name in plan.writes:
            for tensor in _tensors((value,), {}):
                if tensor.__class__ in VIRTUAL:
                    tensor._block.unknown = True
