"""Groups that ranks make by `new_group`: each is a matter of all ranks, in one order, also of those outside it. torch
counts them and names the group by that number, so that two of one number meet. Reads records and source only.
"""

from __future__ import annotations

import ast
import os
from typing import Any

from trimtab.diagnose import branches, source
from trimtab.diagnose.branches import Said
from trimtab.diagnose.finding import Finding, Place, cause_at, place_from

Record = dict[str, Any]

_FIX = (
    "Every rank has to call new_group for every group, in one order, also for those that it is not in: make all of "
    "them first, outside of any condition on the rank, and let each rank pick its own (or "
    "torch.distributed.new_subgroups)."
)


def unlike(rank: int, mine: Record, other: int, theirs: Record) -> Finding | None:
    """Two groups of one number that are not the same, where each of two ranks is in the one that it makes."""
    members, others = mine["makes"], theirs["makes"]
    # One rank by itself connects to nobody.
    if members == others or len(members) == len(others) == 1 or rank not in members or other not in others:
        return None
    (low, first), (high, second) = sorted([(rank, mine), (other, theirs)], key=lambda side: side[0])
    where, stands = place_from(first["place"]), place_from(second["place"])
    message = (
        f"Group number {mine['n']} of new_group: rank {low} makes one of {_named(first)}, rank {high} one of "
        f"{_named(second)}. Both get the same name and meet in the same store: the ranks would wait for ever, or "
        "connect to those of the other group."
    )
    condition = _condition(where, stands)
    if condition is None:
        why = "which ranks are in it is not the same on every rank"
        return Said(cause_at(where, why), _FIX).finding(message, where, "new_group")
    why = "the ranks take different branches here, and each makes another group"
    return Said(source.cause(condition.file, condition.line, why), _FIX).finding(message, where, "new_group")


def _condition(one: Place | None, other: Place | None) -> Place | None:
    """The condition of which the two lines are different branches, or on which what one line is given hangs."""
    if one is None or other is None or one.file != other.file:
        return None
    for at in (one, other):
        for node in branches.conditions(at.file, at.line):
            if branches.side(node, one.line) != branches.side(node, other.line):
                return source.place(one.file, node.lineno)
    for call in source.call_on(one.file, one.line):
        for name in sorted(source.names_in(call)):
            made = source.assignments(one.file, one.line, name)
            value = source.value_for(made[0], name) if len(made) == 1 else None
            if isinstance(value, ast.IfExp):
                return source.place(one.file, value.lineno)
            for node in (n for each in made[1:] for n in branches.conditions(one.file, each.lineno)):
                return source.place(one.file, node.lineno)
    return None


def _named(record: Record) -> str:
    place, members = place_from(record["place"]), ", ".join(map(str, record["makes"]))
    return f"ranks {members}" + (f" at {os.path.basename(place.file)}:{place.line}" if place else "")
