"""When each perturbed weight of a pass is made, where it lies, and who brings its tensor up to date. Numbers only.

A pass reads weights in an order that its first run has taken down. Each is made in a ring of scratch memory as soon as
all that lay in its place has been read. A step may leave its update to the next pass: then whoever makes a weight first
writes the update to its tensor. This file knows neither streams nor kernels; `ahead.py` carries out what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

ALIGNED = 256
"""Bytes: where a weight in the ring begins."""

Way = Literal["ahead", "here", "table"]
"""ahead: made in the ring. here: made by the product itself, or where it stands. table: rows of it are looked up."""


@dataclass(frozen=True)
class Read:
    """Rows of a tensor that one product reads, or a table in which rows are looked up."""

    owner: int
    """The address of the whole tensor."""
    first: int
    """Its element at which the rows begin."""
    size: int
    """What all lanes of them take, in bytes."""
    way: Way
    kind: str = ""
    """What can be made in one launch has one kind; "" is made by itself."""
    also: tuple[int, ...] = ()
    """Further tensors, whole ones, that the same product reads."""

    @property
    def owners(self) -> tuple[int, ...]:
        return (self.owner, *self.also)


@dataclass(frozen=True)
class Batch:
    """Reads whose weights are made at once."""

    reads: tuple[int, ...]
    after: int
    """The last read of what lies in their places before them; -1: none."""


@dataclass(frozen=True)
class Plan:
    """In which batches the weights are made, and more about each read."""

    batches: list[Batch]
    places: list[int]
    """Where in the ring each read finds its weights, in bytes."""
    carries: list[bool]
    """Whether whoever makes them brings these rows of the tensor up to date."""
    begin: frozenset[int]
    """Tensors that are brought up to date before anything else,"""
    between: frozenset[int]
    """and those that are at some time between the first product and the last ones."""
    late: frozenset[int]
    """Tables that are looked up before they are brought up to date."""


def plan(reads: Sequence[Read], ring: int, tensors: Iterable[int], *, carry: bool) -> Plan:
    """`ring`: its bytes. `tensors`: the addresses of all that are tuned. `carry`: passes may be owed an update."""
    places, after = _places(reads, ring)
    batches = _batches(reads, after, ring * 2 // 5)
    if not carry:
        nothing: frozenset[int] = frozenset()
        return Plan(batches, places, [False] * len(reads), nothing, nothing, nothing)
    ways, products = _ways(reads), _first_products(reads)
    last_ahead = max((at for at, read in enumerate(reads) if read.way == "ahead"), default=-1)
    alone = last_ahead < 0
    begin: set[int] = set()
    between: set[int] = set()
    carried: set[int] = set()
    parted = _parted(reads)
    for owner in tensors:
        found = ways.get(owner, set())
        if owner in parted:
            begin.add(owner)
        elif found == {"ahead"} or (found == {"here"} and (alone or products[owner] < last_ahead)):
            carried.add(owner)
        elif found in ({"here"}, {"table"}) and not alone:
            between.add(owner)
        else:
            begin.add(owner)
    carries, seen = [], set[tuple[int, int]]()
    for read in reads:
        rows = (read.owner, read.first)
        carries.append(read.way != "table" and carried.issuperset(read.owners) and rows not in seen)
        if carries[-1]:
            seen.add(rows)
    late = frozenset(carried | between)
    return Plan(batches, places, carries, frozenset(begin), frozenset(between), late)


def _places(reads: Sequence[Read], ring: int) -> tuple[list[int], list[int]]:
    places, after, end = [0] * len(reads), [-1] * len(reads), 0
    for at, read in enumerate(reads):
        if read.way != "ahead":
            continue
        size = -(-read.size // ALIGNED) * ALIGNED
        begin = 0 if end + size > ring else end
        end = begin + size
        places[at] = begin
        after[at] = next(
            (
                before
                for before in range(at - 1, -1, -1)
                if reads[before].way == "ahead"
                and places[before] < end
                and begin < places[before] + reads[before].size
            ),
            -1,
        )
    return places, after


def _batches(reads: Sequence[Read], after: Sequence[int], most: int) -> list[Batch]:
    """Neighbours of one kind together, up to so many bytes: fewer launches, and the ring still holds several."""
    groups: list[list[int]] = []
    size = 0
    for at, read in enumerate(reads):
        if read.way != "ahead":
            continue
        joins = bool(groups) and read.kind != "" and read.kind == reads[groups[-1][0]].kind
        if joins and size + read.size <= most:
            groups[-1].append(at)
            size += read.size
        else:
            groups.append([at])
            size = read.size
    return [Batch(tuple(group), max(after[at] for at in group)) for group in groups]


def _ways(reads: Sequence[Read]) -> dict[int, set[str]]:
    """How each tensor is read. A look-up before the first product can take what is owed along, so it does not count."""
    ways: dict[int, set[str]] = {}
    products = 0
    for read in reads:
        if read.way != "table":
            products += 1
            for owner in read.owners:
                found = ways.setdefault(owner, set())
                found.discard("table")
                found.add(read.way)
            continue
        found = ways.setdefault(read.owner, set())
        if products:
            # By then a product's weights may be on their way: the table would be read half up to date.
            found.add("table among products")
        elif not found:
            found.add("table")
    return ways


def _first_products(reads: Sequence[Read]) -> dict[int, int]:
    first: dict[int, int] = {}
    for at, read in enumerate(reads):
        if read.way != "table":
            for owner in read.owners:
                first.setdefault(owner, at)
    return first


def _parted(reads: Sequence[Read]) -> set[int]:
    """Tensors that one product reads together with others and another one otherwise: no single one updates them all."""
    together: dict[int, set[tuple[int, ...]]] = {}
    for read in reads:
        for owner in read.owners:
            together.setdefault(owner, set()).add(read.owners)
    return {
        owner
        for read in reads
        if read.also and any(len(together[each]) > 1 for each in read.owners)
        for owner in read.owners
    }
