"""Ranks that wait in a ring: each in a collective of one group, for a rank that waits in one of another group. Every
group by itself is in order; the order of the groups is not the same on all ranks. Reads records and source only.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from trimtab.diagnose import branches, source
from trimtab.diagnose.branches import Said
from trimtab.diagnose.finding import Place

Stand = tuple[int, tuple[int, ...], Place]
"""A rank, the ranks of the group in whose collective it waits, and its line."""

_FIX = (
    "Take the groups in one order on every rank: a rank that has entered one group's collective comes to the next only "
    "when all of that group have come."
)


def told(stands: Sequence[Stand]) -> Said | None:
    """What to say where every rank waits for one that waits in another group; None where it is otherwise."""
    groups = {rank: members for rank, members, _ in stands}
    if not all(any(groups.get(one, ()) != members for one in members) for members in groups.values()):
        return None  # also where somebody waits for all ranks: of such a group no members are told
    rank, members, place = stands[0]
    other = next(one for one in members if groups.get(one, ()) != members)
    waits = f"rank {rank} waits for rank {other} here, which waits in a collective of other ranks"
    at = _order(place)
    if at is None:
        return Said(source.cause(place.file, place.line, f"{waits}, and so on in a ring"), _FIX)
    why = f"the order of the groups is not the same on every rank: {waits} (line {place.line}), and so on in a ring"
    return Said(source.cause(place.file, at, why), _FIX)


def _order(place: Place) -> int | None:
    """The condition under which what the loop around a collective goes through is made in another order."""
    loops = [n for n in branches.around(place.file, place.line) if isinstance(n, ast.For)]
    for name in (name for loop in loops for name in sorted(source.names_in(loop.iter))):
        made = source.assignments(place.file, place.line, name)
        for one in made if len(made) > 1 else ():
            for condition in branches.conditions(place.file, one.lineno):
                return condition.lineno
        if len(made) == 1 and isinstance(value := source.value_for(made[0], name), ast.IfExp):
            return value.lineno
    return None
