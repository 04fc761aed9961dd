"""Every allocation and release on one virtual GPU in order, and what follows from it: peaks by phase, kinds, a timeline.

Events are numbers in an array; what they mean is worked out when somebody asks. A phase is kept as its stretch with the
highest peak (`Lap`), so that a long run takes no more memory than a short one. Never decides what an allocation costs:
allocator.py does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trimtab.virtual.origin import Handle

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary", "cache", "workspace", "other")


@dataclass
class Peak:
    """The highest use of a device in one phase, what it was made of and where it came about."""

    phase: str
    peak_bytes: int
    reserved_bytes: int
    kinds: dict[str, int]
    op: str = ""
    module: str = ""
    where: Handle | None = None
    """The user's line, and below it the library's: `origin.resolve` gives file and line."""
    inside: Handle | None = None


@dataclass
class Timeline:
    """The bytes of each kind over one stretch of a phase. `at` counts allocations and releases."""

    phase: str
    at: list[int]
    kinds: dict[str, list[int]]
    marks: list[tuple[int, str]]


@dataclass
class Lap:
    """A stretch of a phase: what lived when it began, and every event since."""

    phase: str
    held: dict[int, int]
    """What lived when it began: number of the allocation, and its bytes."""
    first: int
    """The number of the first allocation in it."""
    events: array[int] = field(default_factory=lambda: array("q"))
    """An allocation by its bytes, a release by the complement (`~`) of the allocation's number."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    peak: int = 0
    reserved: int = 0


class Ledger:
    """The book of one device."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        """What was told of allocations, by their numbers."""
        self.lap = Lap("load", {}, 0)
        self.laps: list[Lap] = [self.lap]
        self.made = 0

    def begin(self, phase: str) -> None:
        """What is allocated from now on belongs to this phase."""
        self.lap = Lap(phase, dict(self._end(self.lap)), self.made)
        self.laps.append(self.lap)

    def mark(self, name: str) -> None:
        """A part of the step begins: "forward", "backward", "optimizer"."""
        self.lap.marks.append((len(self.lap.events), name))

    def tell(self, held: Any, kind: str) -> None:
        """The memory of a tensor (or a block) is of this kind."""
        block = getattr(held, "_block", held)
        self.kinds[block.serial] = kind

    def peaks(self) -> list[Peak]:
        """The highest use in each phase, in order."""
        return [self._peak(lap) for lap in self.laps if lap.events or lap.held]

    def timeline(self, phase: str, points: int = 400) -> Timeline:
        """The bytes of each kind over a phase, at most so many points, the peak among them."""
        lap = next(lap for lap in self.laps if lap.phase == phase)
        steps = list(self._steps(lap))
        step = max(1, -(-len(steps) // points))
        chosen = range(0, len(steps), step)
        series = {kind: [steps[at].get(kind, 0) for at in chosen] for kind in KINDS}
        return Timeline(phase, list(chosen), series, lap.marks)

    def _end(self, lap: Lap) -> Iterator[tuple[int, int]]:
        live = dict(lap.held)
        number = lap.first
        for event in lap.events:
            if event >= 0:
                live[number] = event
                number += 1
            else:
                live.pop(~event)
        yield from live.items()

    def _steps(self, lap: Lap) -> Iterator[dict[str, int]]:
        live, number, totals = dict(lap.held), lap.first, dict.fromkeys(KINDS, 0)
        for serial, size in live.items():
            totals[self.kinds.get(serial, "temporary")] += size
        yield dict(totals)
        for event in lap.events:
            if event >= 0:
                live[number] = event
                totals[self.kinds.get(number, "temporary")] += event
                number += 1
            else:
                totals[self.kinds.get(~event, "temporary")] -= live.pop(~event)
            yield dict(totals)

    def _peak(self, lap: Lap) -> Peak:
        kinds = max(self._steps(lap), key=lambda totals: sum(totals.values()))
        return Peak(lap.phase, sum(kinds.values()), sum(kinds.values()), kinds)
