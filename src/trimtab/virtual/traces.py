"""Remembers where the results of operations come from, as origin.py keeps it. Called only when somebody listens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trimtab.virtual import origin
from trimtab.virtual.plans import VIEW, Plan
from trimtab.virtual.tensor import VIRTUAL


def made(plan: Plan, result: Any, args: tuple[Any, ...]) -> None:
    """Remember where a virtual result was made, or where it was moved to its device."""
    if isinstance(result, Tensor):
        source = args[0] if args else None
        if plan.name == "aten::_to_copy":
            if source.__class__ not in VIRTUAL or source._slot is not result._slot:  # type: ignore[attr-defined]
                origin.note_move(source, result)  # type: ignore[arg-type]
                return
        elif plan.kind == VIEW and _inherit(result, source):
            return
        if origin.ATTRIBUTE not in result.__dict__:
            result.__dict__[origin.ATTRIBUTE] = origin.Trace(origin.here(1))
    else:
        _trace_many(result)


def made_plain(plan: Plan, result: Any, args: tuple[Any, ...]) -> None:
    """Remember where a plain tensor was made, or that it was copied back from a virtual device."""
    if isinstance(result, Tensor):
        source = args[0] if args else None
        if source.__class__ in VIRTUAL:
            if result is not source:
                origin.note_move(source, result)
        elif plan.kind == VIEW and result is not source and _inherit(result, source):
            return
        elif origin.ATTRIBUTE not in result.__dict__:
            result.__dict__[origin.ATTRIBUTE] = origin.Trace(origin.here(1))
    else:
        _trace_many(result)


def _inherit(result: Tensor, source: Any) -> bool:
    """A view is the same tensor by another name: what is known of the one is known of the other."""
    known = source.__dict__.get(origin.ATTRIBUTE) if isinstance(source, Tensor) else None
    if known is None:
        return False
    result.__dict__[origin.ATTRIBUTE] = known
    return True


def _trace_many(result: Any) -> None:
    if isinstance(result, (list, tuple)):
        trace = origin.Trace(origin.here(2))
        for item in result:
            if isinstance(item, Tensor) and origin.ATTRIBUTE not in item.__dict__:
                item.__dict__[origin.ATTRIBUTE] = trace
