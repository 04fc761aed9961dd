"""What to say of ranks that disagree on a collective: both sides, the line that parts them, what to write. Reads
records and source only; who disagrees is found by `agreement` (live) and `standstill`."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import replace
from functools import cache
from typing import Any

from trimtab.diagnose import answers, branches, flow, loops_left, mends_collectives, parted, rewrite, source
from trimtab.diagnose.answers import Sides
from trimtab.diagnose.branches import Said
from trimtab.diagnose.finding import Finding, Place, cause_at, place_from
from trimtab.rehearse import sharded_weights, shared_buffers
from trimtab.rehearse.skipped_modules import Skipped

Record = dict[str, Any]


def stuck(worlds: dict[str, dict[int, list[Record]]]) -> Finding | None:
    """When time ran out: a rank that stands in a collective which another has not entered (read by the parent)."""
    for ranks in worlds.values():
        calls = {rank: [record for record in records if "op" in record] for rank, records in ranks.items()}
        counts = {
            rank: max((record["n"] for record in made if record["group"] == "0"), default=0)
            for rank, made in calls.items()
        }
        if len(set(counts.values())) > 1:
            ahead, behind = max(counts, key=lambda r: counts[r]), min(counts, key=lambda r: counts[r])
            mine = calls[ahead][-1]
            return missing(
                ahead, mine, behind, calls[behind][-1] if calls[behind] else None, None, "time ran out"
            )
    return None


def mixed_up(rank: int, mine: Record, other: int, theirs: Record) -> Finding | None:
    """Ranks that sum up what has other names: they go through a set, or a dict, in different orders."""
    where, way = place_from(mine["place"]), _way(mine)
    if where is None or where != place_from(theirs["place"]) or mine["op"] not in ("all_reduce", "reduce"):
        return None
    looped = _asked(mine) and _in_loop(*way[0])
    said = parted.other_order(*way[0], _sides(rank, mine, other, theirs)) if looped else None
    message = f"Collective number {mine['n']}, {_said(mine)}: rank {rank} and rank {other} give figures of different "
    return (
        said.finding(f"{message}names, and get their sum.", where, mine["op"]) if said is not None else None
    )


def mixed_weights(rank: int, mine: Record, other: int, theirs: Record) -> Finding | None:
    """Ranks for which FSDP2 gathers, or reduces, parameters of different modules in one collective of one size.

    At one line of one step: ranks that stand at different ones have parted before, and will be seen to.
    """
    (low, first), (high, second) = sorted([(rank, mine), (other, theirs)], key=lambda side: side[0])
    names = sharded_weights.parted(first.get("weights") or [], second.get("weights") or [])
    if names is None or (first["place"], first["step"]) != (second["place"], second["step"]):
        return None
    where, (one, two) = place_from(first["place"]), names
    message = (
        f"Collective number {mine['n']}, {_said(first)}: rank {low} gives its part of `{one}`, rank {high} that of "
        f"`{two}`. They are of one size, so nobody waits: what each rank gets is made of both, and so are its "
        "gradients."
    )
    why = f"which module is used here hangs on the rank: `{one}` on rank {low}, `{two}` on rank {high}"
    fix = (
        f"Use the same modules in the same order on every rank in every step: give all ranks rows for one of them at a "
        f"time, or run both `{one}` and `{two}` on every rank, the one without rows on a dummy input of the smallest "
        "size, and add its result times 0 to what the loss is made of."
    )
    return Said(cause_at(where, why), fix).finding(message, where, first["op"])


def _asked(record: Record) -> bool:
    """Whether the program's own line calls the collective: not DDP in a backward pass."""
    way = _way(record)
    return bool(way) and _calls(*way[0], record["op"])


@cache
def _calls(file: str, line: int, op: str) -> bool:
    return any(source.called_name(call) == op for call in source.call_on(file, line))


@cache
def _in_loop(file: str, line: int) -> bool:
    return flow.loop_at(source.place(file, line)) is not None


def shared_gpu(rank: int, other: int, record: Record) -> Finding:
    low, high = sorted((rank, other))
    where = place_from(record["place"])
    if (told := mends_collectives.told_rank(_way(record))) is not None:
        place, fix, edits = told.place, told.text, told.edits
    else:
        place = _device_choice(where)
        fix = f"Give each rank its own GPU before any use of CUDA: {mends_collectives.SET_DEVICE}."
        edits = mends_collectives.own_device(where.file) if where is not None else []
    return Finding(
        kind="placement-conflict",
        message=f"Duplicate GPU detected: rank {low} and rank {high} both on {record['gpu']}. NCCL needs a GPU of its "
        "own for every rank.",
        where=where,
        cause=cause_at(place, "the tensors of every rank are on the same GPU"),
        fix=fix,
        op=record["op"],
        edits=edits,
    )


def _device_choice(where: Place | None) -> Place | None:
    if where is None or (line := source.device_choice(where.file, where.line)) is None:
        return where
    return source.place(where.file, line)


def disagreement(
    rank: int, mine: Record, other: int, theirs: Record, skipped: Skipped | None = None
) -> Finding:
    """Two ranks that have come to different collectives, or give other sizes to the same one.

    `skipped`: what is known of a module that only one of them has run.
    """
    (low, first), (high, second) = sorted([(rank, mine), (other, theirs)], key=lambda side: side[0])
    where, stands = place_from(first["place"]), place_from(second["place"])
    same = where == stands and first["op"] == second["op"]
    asked = same and _asked(first)
    told = shared_buffers.parted(low, first, high, second) if same else None
    told = told or (skipped.said if skipped is not None and (skipped.may_be or same) else None)
    told = told or (parted.at_one_line(_way(first), _sides(low, first, high, second)) if asked else None)
    if told is None and same and first["root"] != second["root"]:
        told = mends_collectives.one_root(where)
    if told is None and same and first["numel"] != second["numel"]:
        told = mends_collectives.as_many_objects(where, {low: first["numel"], high: second["numel"]})
    if told is None:
        told = (
            _unequal(first, second, stands) if same and second["born"] else _parted(low, first, high, second)
        )
    if told is None and skipped is not None:
        told = skipped.said
    if told is None and where is not None:
        told = branches.logged_by_some(where.file)
    if told is None:
        why = f"rank {high} stands here while rank {low} stands at {_line(where)}"
        told = Said(cause_at(stands, why), _ALIKE)
    message = (
        f"Collective number {mine['n']}: rank {low} calls {_said(first)}, rank {high} calls {_said(second)}. "
    )
    message += "The ranks would wait for each other for ever, or mix up their data."
    return replace(told, fix=told.fix or _ALIKE).finding(message, where, first["op"])


_ALIKE = (
    "All ranks have to make the same collective calls in the same order, with equal sizes and types: look for a "
    "branch on the rank, or for data of different shape."
)


def _unequal(first: Record, second: Record, stands: Place | None) -> Said:
    """One collective that is given other sizes or types: who made them, or that nothing makes them equal."""
    file, line = second["born"]
    if (frozen := _frozen_by_rank(file, line)) is not None:
        return frozen
    made = source.statement(file, line)
    anew = made is not None and rewrite.has_factory(made)
    if [file, line] in second.get("way", ()) or (first["born"] == second["born"] and not anew):
        shapes = [first.get("shape"), second.get("shape")]
        padded = None
        if first["op"].startswith("all_gather"):
            padded = mends_collectives.padded(stands, *shapes)
            padded = padded or mends_collectives.padded_by_accelerate(stands, *shapes)
        cause = cause_at(stands, "what each rank gives here is of another size")
        if padded is not None:
            return Said(cause, padded.text, padded.edits)
        fix = "Give equal sizes: pad to the longest first (all_gather the sizes), or see that every batch is full "
        return Said(cause, fix + "(drop_last=True).")
    if (other := _two_things(first, second, stands)) is not None:
        return other
    odd = first if first["dtype"] != second["dtype"] and first["dtype"] == "float32" else second
    file, line = odd["born"]
    if first["dtype"] == second["dtype"]:
        return Said(source.cause(file, line, "made here, and it differs from rank to rank"), _ALIKE)
    told = mends_collectives.of_type(source.place(file, line), (second if odd is first else first)["dtype"])
    cause = source.cause(file, line, "made here, of another type than on the other rank")
    return Said(cause, told.text, told.edits)


def _frozen_by_rank(file: str, line: int) -> Said | None:
    """Gradients of which one rank has others, because it alone was told what to train."""
    if not any(source.called_name(call) == "backward" for call in source.call_on(file, line)):
        return None
    for node in branches.rank_conditions_before(file, line):
        for told in (n for statement in node.body for n in ast.walk(statement)):
            if isinstance(told, ast.Attribute) and told.attr in ("requires_grad", "requires_grad_"):
                why = f"only the ranks of line {node.lineno} set here what is trained: the others have other gradients"
                fix = "Freeze, or train, the same parameters on every rank: take this out of the condition."
                return Said(source.cause(file, told.lineno, why), fix)
    return None


def _two_things(first: Record, second: Record, stands: Place | None) -> Said | None:
    """Whole numbers on one rank and none on the other, under other names: a loss and a count in another order."""
    makers = [source.statement(*record["born"]) if record["born"] else None for record in (first, second)]
    whole = ["int" in record["dtype"] for record in (first, second)]
    if None in makers or whole[0] == whole[1] or _names(makers[0]) & _names(makers[1]):
        return None
    lines = [_line(source.place(*record["born"])) for record in (first, second)]
    why = f"the ranks give different things here: one what {lines[0]} makes, the other what {lines[1]} makes"
    fix = "Give them in one order on every rank: go through sorted names, or put them into one tensor and reduce that."
    return Said(cause_at(stands, why), fix)


def _names(statement: ast.stmt | None) -> set[str]:
    """What a statement gives a value."""
    if isinstance(statement, ast.Assign):
        return {name for target in statement.targets for name in source.names_in(target)}
    return (
        source.names_in(statement.target) if isinstance(statement, ast.AnnAssign | ast.AugAssign) else set()
    )


def _parted(low: int, first: Record, high: int, second: Record) -> Said | None:
    """The branch that only one of them took: on the rank, or out of a loop by what it alone decided or drew."""
    where, stands = place_from(first["place"]), place_from(second["place"])
    mine, theirs, sides = _way(first), _way(second), _sides(low, first, high, second)
    if (proven := parted.by_values(mine, theirs, sides)) is not None:
        return proven
    left, inside = _left_loop(where, stands)
    guarded = branches.guard(mine, theirs, sides)
    if guarded is not None and not (left is not None and "rank" in left.code):
        return guarded
    returned = branches.left_function(mine, theirs, high) or branches.left_function(theirs, mine, low)
    if returned is not None or where is None or stands is None:
        return returned
    if left is None:
        return parted.by_place(mine, theirs, sides)
    inner, other = (first, high) if inside == where else (second, low)
    why = "one rank leaves this loop before the other: unequal numbers of steps"
    return (
        loops_left.way_out(_way(inner), other, sides)
        or parted.by_place(mine, theirs, sides)
        or Said(source.cause(left.file, left.line, why), _EVEN)
    )


def at_rest(ways: list[list[tuple[str, int]]], sides: Sides) -> Said | None:
    """What parts two ranks that both wait for ever, from where they stand and what each has in its names."""
    (mine, theirs), sides = ways, replace(sides, at_once=sides.in_one_round(ways[0]))
    return (
        parted.by_values(mine, theirs, sides)
        or branches.guard(mine, theirs, sides)
        or branches.left_function(mine, theirs, sides.ranks[1])
        or branches.left_function(theirs, mine, sides.ranks[0])
    )


def _sides(rank: int, mine: Record, other: int, theirs: Record | None) -> Sides:
    at_once = theirs is not None and (mine["group"], mine["n"]) == (theirs["group"], theirs["n"])
    return answers.sides((rank, mine.get("values", [])), (other, (theirs or {}).get("values", [])), at_once)


_EVEN = "Give every rank the same number of batches (drop_last=True, a DistributedSampler), or run the loop in `with "
_EVEN += "ddp.join():`."


def _way(record: Record | None) -> list[tuple[str, int]]:
    return [(file, line) for file, line in (record or {}).get("way", ())]


def _left_loop(one: Place | None, other: Place | None) -> tuple[Place | None, Place | None]:
    """Why one of two ranks has left the loop in which the other still stands, if it is so, and where that one is."""
    if one is None or other is None or one.file != other.file:
        return None, None
    headers = {place: loop.lineno if (loop := flow.loop_at(place)) else 0 for place in (one, other)}
    inner = max(headers, key=lambda place: headers[place])
    return (flow.way_out(inner), inner) if headers[one] != headers[other] else (None, None)


def _uneven_loop(where: Place | None, record: Record) -> Place | None:
    """Why the loop around a collective may end earlier on one rank: the innermost one of the way to it that can."""
    way = [source.place(file, line) for file, line in _way(record)]
    for at in (where, *way):
        if at is None or (loop := flow.loop_at(at)) is None:
            continue
        if not flow.is_same_everywhere(loop):
            return flow.way_out(at)
    return flow.way_out(where) if where is not None else None


def missing(
    rank: int, mine: Record, other: int, last: Record | None, where: Place | None, error: str
) -> Finding:
    where = place_from(mine["place"]) or where
    seen = f"its last one was {_said(last)}" if last else "it has made none"
    loop = _uneven_loop(where, mine)
    idle = flow.idle_context(where) if where else None
    way, sides = _way(mine), _sides(rank, mine, other, last)
    said = None
    if not idle:
        said = (
            parted.by_values(way, _way(last), sides)
            or branches.guard(way, _way(last), sides)
            or loops_left.way_out(way, other, sides)
            or branches.left_function(way, _way(last), other)
        )
    if said is None:
        why = f"rank {rank} goes on when rank {other} has already left: unequal numbers of steps"
        why += ", and this context, which could even them out, does nothing" if idle else ""
        said = Said(cause_at(idle or loop or where, why), _EVEN)
    message = (
        f"Rank {rank} waits in {_said(mine)} (its collective number {mine['n']}), which rank {other} never "
    )
    message += f"enters: {seen}. On hardware it would wait until the time-out ends the run{_heard(error)}."
    return said.finding(message, where, mine["op"])


def _heard(error: str) -> str:
    found = re.search(r"Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms", error)
    return f" (here: {found[0]})" if found else ""


def _said(record: Record) -> str:
    place = place_from(record["place"])
    size = f" of {record['numel']} {record['dtype']}" if record["numel"] is not None else ""
    root = f" from rank {record['root']}" if record["root"] is not None else ""
    return f"{record['op']}{size}{root}" + (f" at {_line(place)}" if place else "")


def _line(place: Place | None) -> str:
    return f"{os.path.basename(place.file)}:{place.line}" if place else "an unknown line"
