"""Remembers where the results of operations come from, as origin.py keeps it. Called only when somebody listens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from trimtab.virtual import extents, origin
from trimtab.virtual.plans import VIEW, Plan
from trimtab.virtual.tensor import VIRTUAL


def made(plan: Plan, result: Any, args: tuple[Any, ...]) -> None:
    """Remember where a result was made, or where it was moved to its device or back from a virtual one."""
    if origin.no_user_ran():
        return  # no line of a user's could be remembered
    virtual = result.__class__ in VIRTUAL
    if not virtual and not isinstance(result, Tensor):
        _trace_many(plan, result, args)
        return
    source: Any = args[0] if args else None
    known = result.__dict__
    here: origin.Handle | bool | None = False
    from_virtual = source.__class__ in VIRTUAL
    crossed = (source._slot if from_virtual else None) is not (result._slot if virtual else None)
    if crossed and (plan.name == "aten::_to_copy" or not virtual):
        origin.note_move(source, result)
    elif not (plan.kind == VIEW and _inherit(known, source)) and origin.ATTRIBUTE not in known:
        here = origin.here(1)
        known[origin.ATTRIBUTE] = origin.Trace(here)
    if from_virtual or not is_lazy(source):
        extents.follow(plan, result, args, here)


def _inherit(known: dict[str, Any], source: Any) -> bool:
    """A view is the same tensor by another name: what is known of the one is known of the other."""
    trace = source.__dict__.get(origin.ATTRIBUTE) if isinstance(source, Tensor) else None
    if trace is None:
        return False
    known[origin.ATTRIBUTE] = trace
    return True


def _trace_many(plan: Plan, result: Any, args: tuple[Any, ...]) -> None:
    if isinstance(result, (list, tuple)):
        here = origin.here(2)
        trace = origin.Trace(here)
        for item in result:
            if isinstance(item, Tensor) and origin.ATTRIBUTE not in item.__dict__:
                item.__dict__[origin.ATTRIBUTE] = trace
                extents.follow(plan, item, args, here)
