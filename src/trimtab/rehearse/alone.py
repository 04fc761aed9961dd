"""What only one rank should have done, or should not have done alone: a file that several save at once, a copy of a
model that one writes and all run. What the ranks wrote down is compared when the run is over (by the parent)."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

from trimtab.diagnose import branches, mends_results, source
from trimtab.diagnose.finding import Finding, place_from
from trimtab.rehearse import agreement
from trimtab.rehearse.rank_records import Records, near

_Sides = dict[int, dict[str, Any]]


def found(folder: Path) -> list[Finding]:
    """Such files and copies, in every process group of the run."""
    worlds = agreement.worlds(folder).values()
    return [one for ranks in worlds for one in (_one_file(ranks), _one_sided(ranks)) if one is not None]


def _one_file(ranks: Records) -> Finding | None:
    """Two ranks that save to one path, with no collective between the two that would keep them apart."""
    saved = [(rank, r) for rank, records in ranks.items() for r in records if "saved" in r]
    for (rank, one), (other, two) in combinations(saved, 2):
        ordered = any(
            one["after"][group] != two["after"][group] for group in one["after"].keys() & two["after"]
        )
        if rank == other or one["saved"] != two["saved"] or one["saved"].startswith("/dev/") or ordered:
            continue
        first, place = place_from(one["place"]), place_from(two["place"])
        if place is None or _locked(two["way"]):
            continue
        sharded = any(r.get("sharded") for records in ranks.values() for r in records)
        fix = mends_results.saved_by_one(place, sharded)
        message = f"Rank {rank} and rank {other} save {os.path.basename(one['saved'])} at the same time: they write "
        message += "into one file, and what is left of it may be a mixture that cannot be loaded."
        why = "every rank writes this file"
        why += f": rank {rank} does so at line {first.line}" if first is not None and first != place else ""
        return fix.finding("ranks-disagree", message, place, why, "torch.save")
    return None


def _locked(way: list[list[Any]]) -> bool:
    """Whether a lock is held around one of these lines."""
    nodes = [(file, source.statement(file, line)) for file, line in way]
    above = [n for file, node in nodes if node is not None for n in source.above(file, node)]
    held = [ast.unparse(item) for n in above if isinstance(n, ast.With) for item in n.items]
    return any("lock" in text.lower() for text in held)


def _one_sided(ranks: Records) -> Finding | None:
    """A copy that all ranks run, whose weights only some of them write, and which differs from then on."""
    runs: dict[str, dict[int, _Sides]] = defaultdict(lambda: defaultdict(dict))
    for rank, records in ranks.items():
        for record in (r for r in records if "copy" in r):
            runs[record["copy"]][record["n"]][rank] = record
    for by_run in runs.values():
        common = [sides for _, sides in sorted(by_run.items()) if len(sides) == len(ranks)]
        wrote = [rank for rank, side in common[-1].items() if side["written"]] if common else []
        if len(common) < 2 or not 0 < len(wrote) < len(ranks):
            continue
        way = [(file, line) for file, line in common[-1][wrote[0]]["written"]]
        if any(near([side["sums"] for side in sides.values()]) for sides in common[-2:]):
            continue
        if (said := branches.only_here(way)) is not None:
            fix, name = said.as_fix(), common[-1][wrote[0]]["copy"].split()[0]
            message = f"Every rank runs a copy of the model ({name}) that only rank {wrote[0]} keeps up to date: the "
            message += "others go on with weights that have been left behind."
            why = f"only rank {wrote[0]} comes here, where the copy that all ranks run is written"
            where = place_from(common[-1][wrote[0]]["place"])
            return fix.finding("ranks-disagree", message, where, why, "forward")
    return None
