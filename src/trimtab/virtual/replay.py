"""Reads a stretch of a ledger: what each allocation was for, what was held at the peak, the bytes by kind over time.

An allocation of which nothing was told is an activation if it was made in a forward pass and is held when the backward
pass begins, or in one that is computed again and held when that is done; one that was there before the stretch began
is "other"; the rest is temporary. Never changes a ledger.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary", "cache", "workspace", "other")
PARTS = ("forward", "backward", "optimizer")
Kinds = dict[int, str]


@dataclass
class Lap:
    """A stretch of a phase: what was held when it began, and every event since."""

    phase: str
    held: dict[int, int]
    """What was held when it began: number of the allocation, and its bytes."""
    first: int
    """The number of the first allocation in it."""
    forward: int
    """The number of the first allocation of the forward pass that was under way."""
    events: array[int] = field(default_factory=lambda: array("q"))
    """An allocation by its bytes, a release by the complement (`~`) of the allocation's number, 0 for a request that
    failed. What is beyond `done` has the bytes that were asked for, and not yet those that were taken."""
    done: int = 0
    marks: list[tuple[int, str]] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    """What was told of allocations by the end of it."""
    peak: int = 0
    peak_at: int = -1
    """The event of the peak; -1 for the beginning."""
    reserved: int = 0


@dataclass
class Timeline:
    """The bytes of each kind over one stretch of a phase. `at` counts allocations and releases."""

    phase: str
    at: list[int]
    kinds: dict[str, list[int]]
    marks: list[tuple[int, str]]
    """Where a part of the step begins, and its name."""


def forward_begins(lap: Lap) -> int:
    """The number of the first allocation of the last forward pass."""
    number, begun = lap.first, lap.forward
    marks = [at for at, name in lap.marks if name == "forward"]
    if not marks:
        return begun
    return number + sum(event >= 0 for event in lap.events[: marks[-1]])


def kinds_of(lap: Lap, told: Kinds) -> Kinds:
    """What each allocation of a stretch was for, as far as it is not temporary."""
    found = {number: told.get(number, "other") for number in lap.held}
    held = dict.fromkeys(lap.held)
    number, forward, part = lap.first, lap.forward, ""
    marks = iter([*lap.marks, (len(lap.events), "")])
    at, name = next(marks)
    for index in range(len(lap.events) + 1):
        while at == index:
            if name == "recompute" or (name == "forward" and part != "forward"):
                forward = number
            elif name in ("backward", "recomputed") or part == "forward":
                # The pass is over, or the stretch: what it left behind is kept for the backward pass.
                for kept in held:
                    if kept >= forward:
                        found[kept] = told.get(kept, "activations")
            part = name
            at, name = next(marks, (-1, ""))
        if index == len(lap.events):
            break
        event = lap.events[index]
        if event < 0:
            held.pop(~event, None)
            continue
        if event:
            held[number] = None
            if number in told:
                found[number] = told[number]
        number += 1
    return found


def _totals(lap: Lap, kinds: Kinds) -> Iterator[tuple[int, dict[str, int]]]:
    """The bytes of each kind after each event, the first before any: always the same dictionary."""
    totals = dict.fromkeys(KINDS, 0)
    held = dict(lap.held)
    for number, size in held.items():
        totals[kinds[number]] += size
    yield -1, totals
    number = lap.first
    for index, event in enumerate(lap.events):
        if event >= 0:
            held[number] = event
            totals[kinds.get(number, "temporary")] += event
            number += 1
        else:
            totals[kinds.get(~event, "temporary")] -= held.pop(~event)
        yield index, totals


def at_peak(lap: Lap, told: Kinds) -> dict[str, int]:
    """What was held at the peak of a stretch, by kind."""
    for index, totals in _totals(lap, kinds_of(lap, told)):
        if index == lap.peak_at:
            return dict(totals)
    raise AssertionError("a stretch has its peak at its beginning or at one of its events")


def timeline(lap: Lap, told: Kinds, points: int) -> Timeline:
    """The bytes of each kind over a stretch: of each of so many parts the moment with the most, the peak among them."""
    count = len(lap.events) + 1
    width = -(-count // max(points, 1))
    at: list[int] = []
    series: dict[str, list[int]] = {kind: [] for kind in KINDS}
    best: tuple[int, int, list[int]] | None = None
    for index, totals in _totals(lap, kinds_of(lap, told)):
        total = sum(totals.values())
        if best is None or total > best[0]:
            best = total, index + 1, list(totals.values())
        if (index + 2) % width == 0 or index + 2 == count:
            at.append(best[1])
            for kind, nbytes in zip(KINDS, best[2], strict=True):
                series[kind].append(nbytes)
            best = None
    marks = [(index, name) for index, name in lap.marks if name in PARTS]
    return Timeline(lap.phase, at, series, marks)
