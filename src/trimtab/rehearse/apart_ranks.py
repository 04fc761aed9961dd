"""Whether ranks train one model or several: plain parameters that all ranks train and nothing brings together. What
they wrote down is compared when the run is over (by the parent).

What could be another kind of parallelism (see `exchanges`) is left alone; the weights of wrapped models are compared by
`diverged`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from trimtab.diagnose import mends_drift, mends_ranks
from trimtab.diagnose.finding import Finding, place_from
from trimtab.rehearse import agreement, diverged
from trimtab.rehearse.rank_records import (
    Records,
    averages_elsewhere,
    lines_that_ran,
    near,
    only_tensor_parallel,
    other_rows,
    vetoed,
)

_ENOUGH = 3
"""Steps in which ranks have to be given other rows."""


def found(folder: Path) -> list[Finding]:
    """Models that differ between the ranks, in every process group of the run."""
    findings = []
    for ranks in agreement.worlds(folder).values():
        if (one := diverged.found(ranks) or _never_shared(ranks)) is not None:
            findings.append(one)
    return findings


def _never_shared(ranks: Records) -> Finding | None:
    """Plain parameters that all ranks train and nothing ever brings together."""
    begun = {rank: [r for r in records if "optimizer" in r] for rank, records in ranks.items()}
    split = only_tensor_parallel(ranks)
    if (vetoed(ranks) and not split) or not all(begun.values()):
        return None
    for number in sorted({record["optimizer"] for record in next(iter(begun.values()))}):
        heads = [next((r for r in records if r["optimizer"] == number), None) for records in begun.values()]
        if any(head is None for head in heads):
            continue
        head = heads[0]
        assert head is not None
        # Other sizes or settings on each rank: several models are meant.
        if any(h["shapes"] != head["shapes"] or h["figures"] != head["figures"] for h in heads if h):
            continue
        begun_apart = [] if split else _begun_apart(ranks, number, len(head["shapes"]))
        if begun_apart:
            return _begun(ranks, head, begun_apart)
        apart = _apart(ranks, number, len(head["shapes"]))
        files = {place["file"] for place in (head["made"], head["where"]) if place}
        if apart and not any(averages_elsewhere(file, lines_that_ran(ranks)) for file in files):
            if not split:
                return _finding(ranks, head, apart)
            loader = other_rows(ranks, _ENOUGH)
            return _rows_of_one_model(ranks, head, apart, loader) if loader is not None else None
    return None


def _begun_apart(ranks: Records, number: int, count: int) -> list[int]:
    """Positions of the parameters whose gradients are brought together in every step, and whose weights never agree."""
    common = _common(ranks, number, count)
    exchanged = {
        n for records in ranks.values() for r in records if r.get("exchanged") == number for n in r["shared"]
    }
    return [
        n
        for n in sorted(exchanged)
        if len(common) > 1
        and all(all(side["sums"][n] is not None for side in sides) for sides in common)
        and any(any(size for _, size in (side["sums"][n][:2] for side in sides)) for sides in common)
        and all(near([side["sums"][n][:2] for side in sides]) for sides in common)
        and not any(near([side["sums"][n][2:] for side in sides]) for sides in common)
    ]


def _begun(ranks: Records, head: dict[str, Any], apart: list[int]) -> Finding:
    made, moved = place_from(head["made"]), place_from(head["moved"][apart[0]])
    place, model = mends_ranks.model_line(made, moved)
    fix = mends_drift.share_weights(place, model)
    fix.place = fix.place or moved or made
    message = f"{len(ranks)} ranks average their gradients, but begin with different weights, so every rank keeps a "
    why = "each rank makes weights of its own here, and nothing shares them"
    where = place_from(head["where"])
    return fix.finding("ranks-apart", message + "model of its own.", where, why, "optimizer.step")


def _common(ranks: Records, number: int, count: int) -> list[list[dict[str, Any]]]:
    """The steps of one optimizer that all ranks made, with each rank's record."""
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for records in ranks.values():
        for record in records:
            if record.get("apart") == number:
                steps[record["n"]].append(record)
    common = [sides for _, sides in sorted(steps.items()) if len(sides) == len(ranks)]
    return common if all(len(side["sums"]) == count for sides in common for side in sides) else []


def _apart(ranks: Records, number: int, count: int) -> list[int]:
    """Positions of the parameters that differ between the ranks, by gradient and weight, in every step."""
    common = _common(ranks, number, count)
    if len(common) < 2:
        return []
    exchanged = [r["shared"] for records in ranks.values() for r in records if r.get("exchanged") == number]
    known = {n for shared in exchanged for n in shared}
    return [n for n in range(count) if n not in known and _stays_apart(common, n)]


def _stays_apart(steps: list[list[dict[str, Any]]], n: int) -> bool:
    """Whether a parameter's gradients always differ, and its weights once they do (Adam's first steps may be alike)."""
    met, apart = 0, False
    for number, sides in enumerate(steps):
        figures = [side["sums"][n] for side in sides]
        if any(f is None for f in figures):
            return False
        gradients = [f[:2] for f in figures]
        if not any(size for _, size in gradients):
            continue
        alike = near([f[2:] for f in figures])
        # In the first step weights are as they were made.
        if near(gradients) or (number and apart and alike):
            return False
        apart = apart or (number > 0 and not alike)
        met += 1
    return met > 1 and apart


def _rows_of_one_model(
    ranks: Records, head: dict[str, Any], apart: list[int], loader: dict[str, Any]
) -> Finding:
    """Ranks that hold parts of the same layers, and are given other rows each."""
    message = (
        f"{len(ranks)} ranks hold parts of the same layers (tensor parallel), and each is given other rows: what they "
        f"add up in such a layer is made of different inputs, and parameters that are not split ({_shown(head, apart)})"
        " differ between the ranks from the first step on."
    )
    sampler = place_from(loader["sampler"]["place"]) if loader["sampler"] else None
    fix = mends_ranks.Fix(
        "Give all ranks of a tensor-parallel group the same rows in the same order: no DistributedSampler within it, "
        "one seed for the shuffle. Between several such groups share the rows out by num_replicas and rank of the "
        "mesh's data-parallel dimension.",
        sampler or place_from(loader["place"]),
    )
    why = "this gives each rank rows of its own"
    return fix.finding("ranks-apart", message, place_from(head["where"]), why, "optimizer.step")


def _shown(head: dict[str, Any], apart: list[int]) -> str:
    names = [head["names"][n] for n in apart]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _finding(ranks: Records, head: dict[str, Any], apart: list[int]) -> Finding:
    shown = _shown(head, apart)
    whole = len(apart) == len(head["shapes"])
    partly = next((r["shares"] for records in ranks.values() for r in records if "shares" in r), None)
    made, moved = place_from(head["made"]), place_from(head["moved"][apart[0]])
    where = place_from(head["where"])
    rest = "" if whole and not head["wrapped"] else f" ({shown})"
    message = (
        f"{len(ranks)} ranks train parameters{rest} that differ between them from the first step on, and nothing "
        "averages their gradients or weights: every rank trains a model of its own."
    )
    if partly is not None and not whole:
        text = f"Average the gradient of every trained parameter here, those of {shown} too; or let "
        fix = mends_ranks.Fix(f"{text}DistributedDataParallel do it.", place_from(partly))
        why = f"gradients are averaged here, but not those of {shown}"
        return fix.finding("ranks-apart", message, where, why, "optimizer.step")
    fix = mends_ranks.wrap(made, moved, gpu=head["gpu"][apart[0]])
    fix.place = fix.place or moved or made
    why = "nothing wraps this model, so the ranks share no gradients"
    return fix.finding("ranks-apart", message, where, why, "optimizer.step")
