"""The collectives of a rehearsal, rank by rank: what each called, in order, how much it gave. Read by the parent from
what the ranks wrote down before entering; it judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.diagnose.finding import Place, place_from
from trimtab.rehearse import agreement


@dataclass
class Calls:
    """Equal calls of one collective in one step, told once, where the first of them stood."""

    op: str
    group: str
    """The name of its process group; that of all ranks is "0"."""
    ranks: int
    """How many ranks the group has."""
    dtype: str | None
    elements: int
    """Numbers that the rank gave in one call."""
    bytes: int
    where: Place | None
    step: int
    """The optimizer steps that were made before it."""
    count: int = 1


@dataclass
class RankTraffic:
    """What one rank exchanged."""

    rank: int
    calls: list[Calls] = field(default_factory=list)
    bytes: int = 0
    """All that it gave."""
    bytes_per_step: int = 0
    """The most that it gave in one step."""


def gathered(folder: Path) -> list[RankTraffic]:
    """The collectives of every rank of the largest process group that was made."""
    worlds = agreement.worlds(folder)
    ranks = max(worlds.values(), key=len, default={})
    return [_condensed(rank, records) for rank, records in sorted(ranks.items())]


def _condensed(rank: int, records: list[dict[str, Any]]) -> RankTraffic:
    told = RankTraffic(rank)
    known: dict[tuple[Any, ...], Calls] = {}
    steps: dict[int, int] = {}
    for record in records:
        if "op" not in record:
            continue
        elements, dtype = record["gives"] or (0, None)
        place = place_from(record["place"])
        key = (record["step"], record["op"], record["group"], dtype, elements, place)
        if key in known:
            known[key].count += 1
        else:
            known[key] = Calls(
                record["op"],
                record["group"],
                record["size"],
                dtype,
                elements,
                record["bytes"],
                place,
                record["step"],
            )
        steps[record["step"]] = steps.get(record["step"], 0) + record["bytes"]
    told.calls = list(known.values())
    told.bytes, told.bytes_per_step = sum(steps.values()), max(steps.values(), default=0)
    return told
