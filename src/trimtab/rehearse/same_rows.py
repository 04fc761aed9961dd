"""Whether the ranks read the same rows: what they drew is compared when the run is over (by the parent).

All of them: every rank drew the same whole batch in each of at least three different steps and fed the model the same
values. Some of them: rows that a DistributedSampler, or a slice by the rank, was to share out came to several ranks. It
is silent where something was exchanged that another kind of parallelism would exchange.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

from trimtab.diagnose import mends_rows
from trimtab.diagnose.finding import Finding, place_from
from trimtab.diagnose.mends_ranks import Fix
from trimtab.rehearse import agreement
from trimtab.rehearse.rank_records import Records, one_model, shared, vetoed

_ENOUGH = 3
_PART = 0.1
"""The part of a rank's rows from which on an overlap is no padding."""


def found(folder: Path) -> list[Finding]:
    """Loaders that give every rank the same rows, or several of them some of the same."""
    findings = []
    for ranks in agreement.worlds(folder).values():
        if not vetoed(ranks):
            findings += _all_alike(ranks) or _overlaps(ranks)
    return findings


def _all_alike(ranks: Records) -> list[Finding]:
    steps: dict[str, dict[int, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for rank, records in ranks.items():
        for record in records:
            if "rows" in record:
                steps[record["rows"]][record["n"]][rank] = record
    shares = shared(ranks)
    if not shares and not one_model(ranks):
        return []  # several models on the same rows: an ensemble
    findings = []
    for by_step in steps.values():
        common = [sides for _, sides in sorted(by_step.items()) if len(sides) == len(ranks)]
        batches = {tuple(next(iter(sides.values()))["seen"]) for sides in common}
        if len(common) < _ENOUGH or len(batches) < _ENOUGH or not all(map(_alike, common)):
            continue
        one = _finding(ranks, next(iter(common[0].values()))["loader"], len(common))
        if not shares:
            one.fix += " Nothing averages the gradients either: wrap the model in DistributedDataParallel."
        findings.append(one)
    return findings


def _alike(sides: dict[int, dict[str, Any]]) -> bool:
    first, *others = sides.values()
    return bool(first["fed"]) and all(
        other["seen"] == first["seen"] and other["fed"] == first["fed"] for other in others
    )


def _finding(ranks: Records, loader: dict[str, Any], steps: int) -> Finding:
    place = place_from(loader["place"])
    fix = mends_rows.shard(place, iterable=loader["iterable"], sampled=loader["sampler"] is not None)
    why = "this gives every rank the same rows"
    if loader["sampler"] is not None:
        why = "its DistributedSampler was told that there is one rank, or the same rank everywhere"
    message = (
        f"All {len(ranks)} ranks read the same rows: their batches were equal in each of {steps} steps. The "
    )
    message += "work is done several times over, and an epoch is no faster than on one GPU."
    fix.place = fix.place or place
    return fix.finding("same-rows", message, place, why, "DataLoader")


def _overlaps(ranks: Records) -> list[Finding]:
    """Loaders that were to share rows out, and gave several ranks some of the same."""
    drawn: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, records in ranks.items():
        for record in records:
            if "drawn" in record:
                drawn[record["drawn"]][rank] = record
    findings = []
    for sides in (sides for sides in drawn.values() if len(sides) == len(ranks)):
        told = _why(list(sides.values())) if _share(list(sides.values())) > _PART else None
        if told is not None and told[0].place is not None:
            fix, why = told
            findings.append(_overlap(sides, fix, why))
    return findings


def _share(sides: list[dict[str, Any]]) -> float:
    """The greatest part of one rank's rows that another has too; nothing where rows repeat within a rank."""
    given = [set(side["ids"]) for side in sides]
    if any(len(ids) != len(side["ids"]) or len(ids) < 8 for ids, side in zip(given, sides, strict=True)):
        return 0.0
    common = [(len(one & other), min(len(one), len(other))) for one, other in combinations(given, 2)]
    return max((both / size for both, size in common if both >= max(_ENOUGH, len(sides))), default=0.0)


def _why(sides: list[dict[str, Any]]) -> tuple[Fix, str] | None:
    samplers = [side["loader"]["sampler"] for side in sides]
    if all(samplers):
        if len({sampler["seed"] for sampler in samplers}) > 1:
            made = place_from(samplers[0]["place"])
            return mends_rows.one_seed(made), "the sampler of each rank shuffles by a seed of its own"
        splits = [side["loader"]["split"] for side in sides]
        if all(splits) and len({split["print"] for split in splits}) > 1:
            made = place_from(splits[0]["place"])
            return mends_rows.one_order(made), "each rank splits the rows in its own way here"
        return None
    sliced = place_from(sides[0]["loader"]["sliced"])
    if any(samplers) or sliced is None:
        return None
    return mends_rows.one_order(
        sliced, needed=True
    ), "each rank shuffles in its own way before it takes its part"


def _overlap(sides: dict[int, dict[str, Any]], fix: Fix, why: str) -> Finding:
    loader = next(iter(sides.values()))["loader"]
    part = _share(list(sides.values()))
    message = f"The rows were to be shared out between {len(sides)} ranks, but {part:.0%} of those of one rank came to "
    message += "another one too, and others came to none."
    return fix.finding("same-rows", message, place_from(loader["place"]), why, "DataLoader")
