"""Remembers where the results of operations come from, as origin.py keeps it. Called only when somebody listens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from trimtab.virtual import extents, origin
from trimtab.virtual.plans import VIEW, Plan
from trimtab.virtual.rules import slot_of
from trimtab.virtual.tensor import VIRTUAL


def made(plan: Plan, result: Any, args: tuple[Any, ...]) -> None:
    """Remember where a result was made, or where it was moved to its device or back from a virtual one."""
    if not isinstance(result, Tensor):
        _trace_many(plan, result, args)
        return
    source: Any = args[0] if args else None
    here: origin.Handle | bool | None = False
    crossed = slot_of(source) is not slot_of(result)
    if crossed and (plan.name == "aten::_to_copy" or result.__class__ not in VIRTUAL):
        origin.note_move(source, result)
    elif not (plan.kind == VIEW and _inherit(result, source)) and origin.ATTRIBUTE not in result.__dict__:
        result.__dict__[origin.ATTRIBUTE] = trace = origin.Trace(origin.here(1))
        here = trace.born
    if not is_lazy(source):
        extents.follow(plan, result, args, here)


def _inherit(result: Tensor, source: Any) -> bool:
    """A view is the same tensor by another name: what is known of the one is known of the other."""
    known = source.__dict__.get(origin.ATTRIBUTE) if isinstance(source, Tensor) else None
    if known is None:
        return False
    result.__dict__[origin.ATTRIBUTE] = known
    return True


def _trace_many(plan: Plan, result: Any, args: tuple[Any, ...]) -> None:
    if isinstance(result, (list, tuple)):
        here = origin.here(2)
        trace = origin.Trace(here)
        for item in result:
            if isinstance(item, Tensor) and origin.ATTRIBUTE not in item.__dict__:
                item.__dict__[origin.ATTRIBUTE] = trace
                extents.follow(plan, item, args, here)
