"""Ranks that part because a module runs on one of them and not on the other: which, the line that calls it, the
condition under which that stands. Reads records and source only.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from trimtab.diagnose import branches, mends_ranks, source
from trimtab.diagnose.branches import Said, Way

Ran = dict[str, list[Any]]
"""The names of modules that have run, each with the lines that led to its call, innermost first."""


class Skipped(NamedTuple):
    """What is said of a module that one rank alone has run."""

    said: Said
    may_be: bool
    """Whether its call stands under a condition; if not, the other rank may only not have come so far."""


def parting(
    low: int,
    first: Ran,
    high: int,
    second: Ran,
    quiet: Collection[int] = (),
    stands: Mapping[int, Way] | None = None,
) -> Skipped | None:
    """What to say of two ranks of which one alone has run a module, by what each has run in the step.

    `quiet`: the ranks that run without gradients. `stands`: the lines that led each rank to where it is now; a
    condition that it is itself under parts it from nobody.
    """
    stands = stands or {}
    sides = [(low, high, _topmost(first, second)), (high, low, _topmost(second, first))]
    found = [(who, other, name, at) for who, other, only in sides for name, at in only.items() if at]
    if not found:
        return None
    # Where each has run what the other has not, one of them has merely not come so far: what is called in any case.
    may_skip = [one for one in found if _condition(one[3], stands.get(one[1], [])) is not None]
    if len({one[0] for one in found}) > 1 and not may_skip:
        return None
    who, other, name, way = (may_skip or found)[0]
    calls = f"`{name}` has run on rank {who} and not on rank {other}"
    file, line = way[0]
    if (condition := _condition(way, stands.get(other, []))) is not None:
        at = f"{os.path.basename(file)}:{line}"
        asked = source.statement(*condition)
        turns = mends_ranks.as_many_turns(condition[0], asked) if isinstance(asked, ast.If) else None
        if turns is not None:
            why = f"{mends_ranks.IN_TURN}: rank {who} calls `{name}` at {at}, and rank {other} has no further one"
            return Skipped(Said(source.cause(*condition, why), turns.text, turns.edits), bool(may_skip))
        cause = source.cause(*condition, f"{calls}: it is called at {at}, under this condition")
    else:
        cause = source.cause(file, line, f"{calls}: it is called here")
    if who in quiet:
        fix = (
            f"Let every rank evaluate: `{name}` needs all of them. Take its call out of the condition, give each rank "
            "its share of the rows, as many batches to every one, and bring the sums together with dist.all_reduce; "
            f"only what is printed or written belongs to rank {who} alone."
        )
        return Skipped(Said(cause, fix), bool(may_skip))
    fix = (
        f"Run `{name}` on every rank in every step: where a batch has nothing for it, on a dummy input of the smallest "
        "size, and add its result times 0 to what the loss is made of. Then every rank gathers the same weights and "
        "reduces the same gradients (zeros, where it had nothing to give)."
    )
    return Skipped(Said(cause, fix), bool(may_skip))


def _topmost(ran: Ran, other: Ran) -> Ran:
    """What has run here and not there, without what is inside of another such module."""
    only = {name: at for name, at in ran.items() if name not in other}
    return {
        name: at
        for name, at in only.items()
        if not any(name != outer and name.startswith(f"{outer}.") for outer in only)
    }


def _condition(way: list[Any], stands: Way) -> tuple[str, int] | None:
    """The line of the innermost condition under which a call stands, or the call of the function that makes it, and the
    other rank does not."""
    for file, line in way:
        function = branches.function_around(file, line)
        beside = [n for f, n in stands if f == file and branches.function_around(f, n) is function]
        for node in branches.conditions(file, line):
            if not any(branches.side(node, other) == branches.side(node, line) for other in beside):
                return file, node.lineno
    return None
