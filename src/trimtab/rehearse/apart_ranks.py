"""Whether ranks train one model or several: what they wrote down is compared when the run is over (by the parent).

Weights are compared as each step begins, so that averaging after a step counts; a difference is a fault only when it
is never made up for. What could be another kind of parallelism (see `exchanges`) is left alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place, cause_at, place_from
from trimtab.rehearse import agreement, rank_fixes

if TYPE_CHECKING:
    import torch

    from trimtab.rehearse.process import Process

Records = dict[int, list[dict[str, Any]]]
_NEAR = 1e-6
_AVERAGERS = {
    "LocalSGD",
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "PostLocalSGDOptimizer",
    "DiLoCo",
}
_EXCHANGES = frozenset(
    (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce",
        "gather",
    )
) | {"reduce_scatter", "reduce_scatter_tensor", "average_parameters", "all_reduce_coalesced", "send", "recv"}


def weights(
    process: Process,
    model: str,
    step: int,
    parameters: list[torch.Tensor],
    place: Place | None,
    late: Place | None = None,
    averaged: bool = False,
) -> None:
    """Write down a checksum of those parameters of a wrapped model that a step is for; `late` is where one was made
    that came into the model after it was wrapped; `averaged`, that weights were exchanged since the last step."""
    import torch

    total, size = 0.0, 0.0
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad and not parameter.is_meta:
                values = parameter.detach().double()
                total += float(values.sum())
                size += float(values.abs().sum())
    where, after = (asdict(at) if at else None for at in (place, late))
    record = {"model": model, "step": step, "sum": total, "size": size, "place": where, "late": after}
    agreement.note(process, {**record, "averaged": averaged})


def found(folder: Path) -> list[Finding]:
    """Models that differ between the ranks, in every process group of the run."""
    findings = []
    for ranks in agreement.worlds(folder).values():
        if (one := _diverged(ranks) or _never_shared(ranks)) is not None:
            findings.append(one)
    return findings


def vetoed(ranks: Records) -> bool:
    """Whether ranks may differ on purpose."""
    return any("veto" in record for records in ranks.values() for record in records)


def shared(ranks: Records) -> bool:
    """Whether anything brings the ranks' gradients together: DDP, shards, or the program itself."""
    records = [record for mine in ranks.values() for record in mine]
    return any("shares" in r or r.get("wrapped") or r.get("sharded") for r in records)


def one_model(ranks: Records) -> bool:
    """Whether all ranks begin with the same weights and settings."""
    heads = [[r for r in mine if "optimizer" in r] for mine in ranks.values()]
    if not all(len(mine) == len(heads[0]) for mine in heads) or not heads[0]:
        return False
    if any(
        h["shapes"] != g["shapes"] or h["figures"] != g["figures"]
        for m in heads
        for h, g in zip(m, heads[0], strict=True)
    ):
        return False
    first = [[r for r in mine if "apart" in r and r["n"] == 1] for mine in ranks.values()]
    return all(
        a is None or b is None or _near([a[2:], b[2:]])
        for mine in first
        for one, other in zip(mine, first[0], strict=False)
        for a, b in zip(one["sums"], other["sums"], strict=False)
    )


def _same_rows(ranks: Records) -> bool:
    """Whether every rank read the same batches, as far as is known."""
    seen = [[r["seen"] for r in mine if "rows" in r] for mine in ranks.values()]
    return bool(seen[0]) and all(mine == seen[0] for mine in seen)


def _diverged(ranks: Records) -> Finding | None:
    """Ranks whose weights of one wrapped model go apart and stay so."""
    own_way = {r["own_way"]: r["why"] for records in ranks.values() for r in records if "own_way" in r}
    sums: dict[str, dict[int, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for rank, records in ranks.items():
        for record in records:
            if "sum" in record:
                sums[record["model"]][record["step"]][rank] = record
    for model, steps in sums.items():
        if model.endswith(":end"):
            continue
        end = sums.get(model.partition(":")[0] + ":end", {})
        common = [(n, steps[n]) for n in sorted(steps) if len(steps[n]) == len(ranks)]
        why = own_way.get(model.partition(":")[0])
        if why == "cut off":
            continue
        if why == "averages":
            # Between two averagings ranks are apart by design: only right after one they have to agree.
            common = [(n, sides) for n, sides in common if all(side["averaged"] for side in sides.values())]
            if not common:
                continue
        last = [by_rank for by_rank in end.values() if len(by_rank) == len(ranks)]
        apart = [n for n, by_rank in common if (step := _differ(by_rank.values())) is not None and step]
        if not apart or not _differ(common[-1][1].values()) or (last and not _differ(last[-1].values())):
            continue
        again = [n for n, by_rank in common if n > apart[0] and not _differ(by_rank.values())]
        where = place_from(common[-1][1][min(ranks)]["place"])
        if again or (where is not None and averages_elsewhere(where.file, _ran(ranks))):
            continue
        first, other = _sides(common[-1][1])
        late = place_from(common[-1][1][min(ranks)].get("late"))
        return Finding(
            kind="ranks-disagree",
            message=f"When step {apart[0]} begins, the weights of rank {first} and rank {other} differ, and they "
            "stay apart: the ranks train different models.",
            where=where,
            cause=cause_at(
                late, "this came into the model after DDP wrapped it: DDP does not average its gradients"
            ),
            fix="Put it into the model before DistributedDataParallel(...) takes the model."
            if late is not None
            else "Make sure that every backward pass goes through the DDP object, and that nothing changes the "
            "weights on one rank alone.",
            op="optimizer.step",
        )
    return None


def _differ(records: Iterable[dict[str, Any]]) -> bool:
    sides = list(records)
    return any(
        abs(side["sum"] - sides[0]["sum"]) > 1e-7 * max(side["size"], sides[0]["size"], 1e-30)
        for side in sides
    )


def _sides(by_rank: dict[int, dict[str, Any]]) -> tuple[int, int]:
    first = min(by_rank)
    return first, next(r for r in sorted(by_rank) if r != first and _differ([by_rank[first], by_rank[r]]))


def _never_shared(ranks: Records) -> Finding | None:
    """Plain parameters that all ranks train and nothing ever brings together."""
    begun = {rank: [r for r in records if "optimizer" in r] for rank, records in ranks.items()}
    if vetoed(ranks) or not all(begun.values()):
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
        apart = _apart(ranks, number, len(head["shapes"]))
        files = {place["file"] for place in (head["made"], head["where"]) if place}
        if apart and not any(averages_elsewhere(file, _ran(ranks)) for file in files):
            return _finding(ranks, head, apart)
    return None


def _apart(ranks: Records, number: int, count: int) -> list[int]:
    """Positions of the parameters that differ between the ranks, by gradient and weight, in every step."""
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for records in ranks.values():
        for record in records:
            if record.get("apart") == number:
                steps[record["n"]].append(record)
    common = [sides for n, sides in sorted(steps.items()) if len(sides) == len(ranks)]
    if len(common) < 2 or any(len(side["sums"]) != count for sides in common for side in sides):
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
        near = _near([f[2:] for f in figures])
        # In the first step weights are as they were made.
        if _near(gradients) or (number and apart and near):
            return False
        apart = apart or (number > 0 and not near)
        met += 1
    return met > 1 and apart


def _near(sides: list[list[float]]) -> bool:
    return all(
        abs(total - sides[0][0]) <= _NEAR * max(size, sides[0][1])
        and abs(size - sides[0][1]) <= _NEAR * max(size, sides[0][1])
        for total, size in sides
    )


def _ran(ranks: Records) -> set[tuple[str, int]]:
    return {(r["file"], r["ran"]) for records in ranks.values() for r in records if "ran" in r}


def averages_elsewhere(file: str, ran: set[tuple[str, int]]) -> bool:
    """Whether a file holds an exchange of weights or gradients to which this run has not come."""
    for call in source.calls(file):
        name = source.called_name(call)
        if name in _AVERAGERS:
            return True
        if name in _EXCHANGES and (file, call.lineno) not in ran:
            around = _innermost(file, call.lineno)
            text = ast.unparse(around) if around is not None else ""
            if any(word in text for word in ("parameters(", ".grad", "state_dict(", ".data")):
                return True
    return False


def _innermost(file: str, line: int) -> ast.AST | None:
    kinds = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    around = [
        n for n in source.walk(file) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)
    ]
    return max(around, key=lambda n: n.lineno, default=None)


def _finding(ranks: Records, head: dict[str, Any], apart: list[int]) -> Finding:
    names = [head["names"][n] for n in apart]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
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
        place = place_from(partly)
        return Finding(
            kind="ranks-apart",
            message=message,
            where=where,
            cause=cause_at(place, f"gradients are averaged here, but not those of {shown}"),
            fix=f"Average the gradient of every trained parameter here, those of {shown} too; or let "
            "DistributedDataParallel do it.",
            op="optimizer.step",
        )
    fix = rank_fixes.wrap(made, moved, gpu=head["gpu"][apart[0]])
    return Finding(
        kind="ranks-apart",
        message=message,
        where=where,
        cause=cause_at(
            fix.place or moved or made, "nothing wraps this model, so the ranks share no gradients"
        ),
        fix=fix.text,
        op="optimizer.step",
        edits=fix.edits,
    )
