"""What two ranks hand each other: a send and its receive, the parts of an exchange of all with all. NCCL compares
neither their sizes nor their types. Reads records and source only; who wrote them is `agreement`'s to know."""

from __future__ import annotations

import ast
import os
import re
from typing import Any

from trimtab.diagnose import mends_collectives, source
from trimtab.diagnose.branches import Said, Way
from trimtab.diagnose.finding import Finding, Place, cause_at, place_from

Record = dict[str, Any]
_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))
_FUNCTIONAL = re.compile(r"func", re.IGNORECASE)
_NOBODY = "Nothing compares the two: the ranks would wait for ever, or read other numbers than were given."


def unlike_message(sent: Record, awaited: Record) -> Finding | None:
    """A message whose two ends are of another size or type; None where what is sent is what is awaited."""
    apart = sent["dtype"] != awaited["dtype"] and {sent["dtype"], awaited["dtype"]} <= _FLOATS
    if sent["bytes"] == awaited["bytes"] and not apart:
        return None
    (giver, taker), where = awaited["pair"], place_from(awaited["place"])
    message = (
        f"Message number {sent['n']} from rank {giver} to rank {taker}: rank {giver} sends {_size(sent)}"
        f"{_at(sent)}, rank {taker} makes room for {_size(awaited)}{_at(awaited)}. {_NOBODY}"
    )
    made = source.place(*awaited["born"]) if awaited["born"] else where
    if sent["dtype"] == awaited["dtype"]:
        fix = "Make it as large as what is sent: send the shape first, or fill every batch (drop_last=True)."
        why = f"what is received goes into what is made here, which is of another size than what rank {giver} sends"
        return Said(cause_at(made, why), fix).finding(message, where, "recv")
    why = f"what is received goes into what is made here, of another type than what rank {giver} sends"
    told = mends_collectives.of_type(made, sent["dtype"]) if made is not None else None
    cast = f"or send it as it is awaited: .to(torch.{awaited['dtype']}) before the send."
    edits = told.edits if told is not None else []
    fix = f"Make it of the type that is sent (torch.{sent['dtype']}), {cast}"
    return Said(cause_at(made, why), fix, edits).finding(message, where, "recv")


def unlike_parts(rank: int, mine: Record, other: int, theirs: Record) -> Finding | None:
    """An exchange of all with all in which a rank expects another number than it is given."""
    sides = sorted([(rank, mine), (other, theirs)], key=lambda side: side[0])
    for (giver, gives), (taker, takes) in (sides, sides[::-1]):
        given, expected = (
            gives["parts"]["gives"][_seat(gives, taker)],
            takes["parts"]["takes"][_seat(takes, giver)],
        )
        types = [(record["gives"] or [0, None])[1] for record in (gives, takes)]
        if given == expected and (types[0] == types[1] or not {*types} <= _FLOATS):
            continue
        where = place_from(takes["place"])
        message = (
            f"Collective number {mine['n']}, {mine['op']}: rank {giver} gives rank {taker} {given} {types[0]}"
            f"{_at(gives)}, and rank {taker} expects {expected} {types[1]} of it{_at(takes)}. {_NOBODY}"
        )
        if given == expected:
            why, fix = "what each rank gives here is of another type", "Give one type on every rank."
            return Said(cause_at(where, why), fix).finding(message, where, mine["op"])
        why = "what a rank expects of each of the others is told here, and it is not what they give"
        fix = (
            "What a rank gets is what the others give it, not what it gives: exchange the counts first "
            "(`expected = torch.empty_like(counts); dist.all_to_all_single(expected, counts)`), and make "
            "output_split_sizes of what came."
        )
        told = _told_at([(file, line) for file, line in takes.get("way", ())]) or where
        return Said(cause_at(told, why), fix).finding(message, where, mine["op"])
    return None


def _seat(record: Record, rank: int) -> int:
    """The place of a rank in the group of a record."""
    members = record.get("members") or []
    return int(members.index(rank)) if members else rank


def _told_at(way: Way) -> Place | None:
    """The line that says what is expected: followed by its name from the call outwards, and past what only turns it
    into a list."""
    name = ""
    for file, line in way:
        for call in source.call_on(file, line):
            given = source.keyword(call, "output_split_sizes") or _expected(call)
            name = given.id if isinstance(given, ast.Name) else name
        if not name:
            continue
        found, made = None, source.last_assignment(file, line, name)
        while made is not None:
            found, value = made, source.value_for(made, name)
            again = value is not None and name in source.names_in(value)
            made = source.last_assignment(file, made.lineno, name) if again else None
        if found is not None:
            return source.place(file, found.lineno)
    return None


def _expected(call: ast.Call) -> ast.expr | None:
    """What an exchange is told to expect, by its place: the functional one is given no output before it."""
    if source.called_name(call) not in ("all_to_all_single", "all_to_all_single_autograd"):
        return None
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    place = 1 if owner is None or _FUNCTIONAL.search(ast.unparse(owner)) else 2
    return call.args[place] if len(call.args) > place else None


def _size(record: Record) -> str:
    return f"{record['numel']} {record['dtype']}"


def _at(record: Record) -> str:
    place = place_from(record["place"])
    return f" at {os.path.basename(place.file)}:{place.line}" if place else ""
