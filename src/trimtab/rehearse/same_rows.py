"""Whether the ranks read the same rows: their batches are compared when the run is over (by the parent).

It speaks only where every rank drew the same whole batch in each of at least three different steps and fed the model
the same values, and nothing was exchanged that another kind of parallelism would exchange.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from trimtab.diagnose.finding import Finding, cause_at, place_from
from trimtab.rehearse import agreement, rank_fixes
from trimtab.rehearse.apart_ranks import Records, one_model, shared, vetoed

_ENOUGH = 3


def found(folder: Path) -> list[Finding]:
    """Loaders that give every rank the same rows."""
    findings = []
    for ranks in agreement.worlds(folder).values():
        if not vetoed(ranks):
            findings += _in_world(ranks)
    return findings


def _in_world(ranks: Records) -> list[Finding]:
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
    fix = rank_fixes.shard(place, iterable=loader["iterable"], sampled=loader["sampler"])
    why = "this gives every rank the same rows"
    if loader["sampler"]:
        why = "its DistributedSampler was told that there is one rank, or the same rank everywhere"
    return Finding(
        kind="same-rows",
        message=f"All {len(ranks)} ranks read the same rows: their batches were equal in each of {steps} steps. The "
        "work is done several times over, and an epoch is no faster than on one GPU.",
        where=place,
        cause=cause_at(fix.place or place, why),
        fix=fix.text,
        op="DataLoader",
        edits=fix.edits,
    )
