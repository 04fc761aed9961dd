"""What ranks exchanged, on the page of a rehearsal: how much each gave, and its calls in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from trimtab.report.code import place
from trimtab.report.frame import folded, note, raw_table, table, text
from trimtab.report.layers import together
from trimtab.report.memory import size_of

MOST = 200
"""Calls of one rank that are listed."""
Told = Mapping[str, Any]


def collectives_parts(ranks: Sequence[Told]) -> Iterable[str]:
    """An overview, and the calls of each rank; neighbours that made the same ones are told once."""
    if not ranks:
        return
    groups = [list(group) for _, group in groupby(ranks, key=lambda rank: rank["calls"])]
    yield table(
        ["rank", "collectives", "given in all", "most in a step"],
        (
            (
                _named(group),
                f"{sum(calls['count'] for calls in group[0]['calls']):,}",
                size_of(group[0].get("bytes")),
                size_of(group[0].get("bytes_per_step")),
            )
            for group in groups
        ),
    )
    if len(groups) > 1:
        yield note("These ranks did not call the same collectives with the same sizes.")
    for group in groups:
        yield _calls(_named(group), group[0]["calls"], opened=len(groups) > 1)


def _named(group: Sequence[Told]) -> str:
    return together([str(rank["rank"]) for rank in group])


def _calls(who: str, calls: Sequence[Told], *, opened: bool) -> str:
    # Where ranks part, it is at the end.
    shown = calls[-MOST:]
    rows = (
        [
            text(one["step"]),
            text(one["op"]) + (f" × {one['count']:,}" if one["count"] > 1 else ""),
            text(f"{one['elements']:,} {one['dtype']}" if one.get("dtype") else ""),
            text(size_of(one.get("bytes"))),
            text(f"{one['group']} ({one['ranks']} ranks)"),
            place(one.get("where"), {}),
        ]
        for one in shown
    )
    part = f", the last {MOST} of {len(calls):,} kinds" if len(calls) > MOST else ""
    listed = raw_table(["step", "collective", "gives", "bytes", "group", "where"], rows, cards=True)
    return folded(f"Calls of rank {who}{part}", listed, opened=opened)
