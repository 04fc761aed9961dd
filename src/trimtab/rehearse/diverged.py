"""Ranks whose weights of one wrapped model go apart and stay so, and what parted them: what each rank wrote down is
compared when the run is over (by the parent).

Weights are compared as each step begins, so that averaging after a step counts; a difference is a fault only when it is
never made up for. The cause is told from the first step that differs: other weights to begin with, another learning
rate, or gradients that DDP does not average.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trimtab.diagnose import branches, mends_drift, source
from trimtab.diagnose.finding import Finding, Place, place_from
from trimtab.diagnose.mends_ranks import Fix
from trimtab.rehearse import agreement
from trimtab.rehearse.rank_records import Records, averages_elsewhere, lines_that_ran, near

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.rehearse.process import Process

_Sides = dict[int, dict[str, Any]]
"""One record of each rank."""


def note(
    process: Process,
    ddp: DistributedDataParallel,
    model: str,
    step: int,
    parameters: list[torch.Tensor],
    known: dict[str, Any],
) -> None:
    """Write down checksums of those parameters of a wrapped model that a step is for, with what may part them."""
    import torch
    import torch.distributed as dist

    total, size = 0.0, 0.0
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad and not parameter.is_meta:
                values = parameter.detach().double()
                total += float(values.sum())
                size += float(values.abs().sum())
    group = dist.get_process_group_ranks(ddp.process_group)
    record = {"model": model, "group": group, "step": step, "sum": total, "size": size}
    agreement.note(process, {**record, **known})


def found(ranks: Records) -> Finding | None:
    """The first model whose weights differ for good between the ranks of the group that DDP was given for it."""
    groups = {tuple(r["group"]) for records in ranks.values() for r in records if "sum" in r}
    for group in sorted(groups):
        inside = {
            rank: [r for r in records if "sum" not in r or tuple(r["group"]) == group]
            for rank, records in ranks.items()
            if rank in group
        }
        if (one := _in_one_group(inside)) is not None:
            return one
    return None


def _in_one_group(ranks: Records) -> Finding | None:
    own_way = {r["own_way"]: r["why"] for records in ranks.values() for r in records if "own_way" in r}
    sums: dict[str, dict[int, _Sides]] = defaultdict(lambda: defaultdict(dict))
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
        if why in ("cut off", "joins"):
            continue
        if why == "averages":
            # Between two averagings ranks are apart by design: only right after one they have to agree.
            common = [(n, sides) for n, sides in common if all(side["averaged"] for side in sides.values())]
            if not common:
                continue
        last = [by_rank for by_rank in end.values() if len(by_rank) == len(ranks)]
        apart = [n for n, by_rank in common if _differ(by_rank.values())]
        if not apart and (buffers := _buffers_apart(ranks, [sides for _, sides in common])) is not None:
            return buffers
        if not apart or not _differ(common[-1][1].values()) or (last and not _differ(last[-1].values())):
            continue
        again = [n for n, by_rank in common if n > apart[0] and not _differ(by_rank.values())]
        where = place_from(common[-1][1][min(ranks)]["place"])
        if not again and not (where is not None and averages_elsewhere(where.file, lines_that_ran(ranks))):
            return _finding(dict(common), apart[0], where)
    return None


def _finding(steps: dict[int, _Sides], first: int, where: Place | None) -> Finding:
    sides, before = steps[first], steps.get(first - 1)
    one, other = _two(sides)
    fix, why = _written(sides) if before is None else _parted(before)
    if fix.place is None and before is not None and before is not steps[min(steps)]:
        fix, why = _written(sides)
    message = (
        f"When step {first} begins, the weights of rank {one} and rank {other} differ, and they stay apart: "
    )
    message += "the ranks train different models."
    return fix.finding("ranks-disagree", message, where, why, "optimizer.step")


def _buffers_apart(ranks: Records, steps: list[_Sides]) -> Finding | None:
    """Buffers that were alike when training began, that each rank writes from its own rows, and that stay apart."""
    if len(steps) < _ENOUGH:
        return None
    first = next(iter(steps[-1].values()))
    ways = {name: [(f, n) for f, n in way] for name, way in first["kept"].items()}
    brought = {name for records in ranks.values() for r in records for name in r.get("brought", ())}
    apart = [
        name
        for name in first["buffers"]
        if name in ways
        and name not in brought
        and not averages_elsewhere(ways[name][0][0], lines_that_ran(ranks), (f".{name.rpartition('.')[2]}",))
        and near([side["began"][name] for side in steps[0].values()])
        and not any(near([side["buffers"][name] for side in sides.values()]) for sides in steps[1:])
    ]
    if not apart:
        return None
    places = sorted({source.place(*ways[name][0]) for name in apart}, key=lambda p: (p.file, p.line))
    fix = mends_drift.averaged(places)
    message = f"The buffers {', '.join(apart)} of the model go apart: each rank writes into them what its rows give, "
    message += (
        "and DDP was told not to share them (broadcast_buffers=False). The ranks train different models."
    )
    why = "each rank writes what it alone has seen, and nothing brings it together"
    return fix.finding("ranks-disagree", message, place_from(first["place"]), why, "optimizer.step")


_ENOUGH = 4
"""Steps that are compared before buffers are said to stay apart."""
_NOTHING = Fix(
    "Make sure that every backward pass goes through the DDP object, and that nothing changes the weights on one rank "
    "alone."
)


def _parted(before: _Sides) -> tuple[Fix, str]:
    """Why the ranks made other steps from the same weights."""
    mine = next(iter(before.values()))
    if any(side["rates"] != mine["rates"] for side in before.values()):
        told = [side["rated"] for side in before.values() if side["rated"]]
        rated = place_from(told[0]) if told else None
        if rated is not None and len(told) < len(before):
            guarded = branches.only_here([(rated.file, rated.line)])
            if guarded is not None:
                return guarded.as_fix(), "only some ranks come here, where the learning rate is set"
        step = place_from(mine["place"])
        place = rated or _sets_rate(step)
        if rated is None and place is not None and step is not None:
            place = mends_drift.called_beside(place, step)
        why = "the ranks step with different learning rates, which are set here"
        return mends_drift.same_rate(place), why
    outside = mine["outside"] or {}
    if unsynced := place_from(outside.get("unsynced")):
        return mends_drift.synced(unsynced), "the last backward pass before each step is inside this"
    if past := place_from(outside.get("past")):
        why = "only a call of the DDP object itself makes the ranks share gradients"
        return mends_drift.through_ddp(past), why
    if late := place_from(outside.get("late")):
        why = "this came into the model after DDP wrapped it: DDP does not average its gradients"
        return Fix("Put it into the model before DistributedDataParallel(...) takes the model.", late), why
    if unfrozen := place_from(outside.get("unfrozen")):
        why = "made trainable after DDP wrapped the model: DDP averages only what required a gradient then"
        return mends_drift.wrap_again(unfrozen, place_from(mine["at"])), why
    if not _same(before, "state"):
        return _other_state(before)
    ways = [side["changed"] for side in before.values()]
    if any(ways) and not _same(before, "gradients"):
        return _changed([[(f, n) for f, n in way] for way in ways])
    return _NOTHING, ""


def _same(sides: _Sides, name: str) -> bool:
    """Whether a pair of sums is the same on all ranks."""
    return near([side[name] for side in sides.values()])


def _other_state(before: _Sides) -> tuple[Fix, str]:
    """The same gradients, and other momenta to add them to: loaded on some ranks, or from other files."""
    loaded = [place for side in before.values() if (place := place_from(side["loaded"])) is not None]
    if not loaded:
        return _NOTHING, ""
    guarded = branches.only_here([(loaded[0].file, loaded[0].line)]) if len(loaded) < len(before) else None
    if guarded is not None:
        why = "only some ranks come here: the others step without the optimizer's state that is loaded here"
        return guarded.as_fix(), why
    fix = Fix("Load the same optimizer state on every rank.", loaded[0])
    return fix, "the ranks come out of this with different momenta"


def _changed(ways: list[list[tuple[str, int]]]) -> tuple[Fix, str]:
    """Gradients that DDP had averaged, and that each rank (or one) then changed."""
    way = next(way for way in ways if way)
    if not all(ways) and (guarded := branches.only_here(way)) is not None:
        return guarded.as_fix(), "only some ranks come here, and change gradients that DDP had averaged"
    why = "each rank changes the averaged gradients in its own way here"
    return mends_drift.share_written(source.place(*way[0])), why


def _written(sides: _Sides) -> tuple[Fix, str]:
    """Why the ranks begin with other weights: something wrote into them after DDP had made them equal."""
    ways = {rank: [(f, n) for f, n in side["written"]] for rank, side in sides.items()}
    wrote = [rank for rank, way in ways.items() if way]
    if not wrote:
        return _NOTHING, ""
    way = ways[wrote[0]]
    if len(wrote) < len(ways) and (guarded := branches.only_here(way)) is not None:
        return guarded.as_fix(), f"only rank {wrote[0]} comes here, after DDP had made the weights equal"
    why = "each rank writes values of its own into the weights here, after DDP had made them equal"
    if (fix := mends_drift.share_written(source.place(*way[0]))).edits:
        return fix, why
    return mends_drift.share_weights(_beside(way, place_from(sides[wrote[0]]["at"]))), why


def _beside(way: list[tuple[str, int]], at: Place | None) -> Place:
    """The line of a way that stands in the function that wrapped the model; else the innermost one."""
    for file, line in way:
        around = source.function_at(at.file, at.line) if at is not None and at.file == file else ...
        if source.function_at(file, line) is around:
            return source.place(file, line)
    return source.place(*way[0])


def _sets_rate(where: Place | None) -> Place | None:
    """The line of the file that sets a learning rate by hand."""
    for node in source.walk(where.file) if where is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in (t for t in targets if isinstance(t, ast.Subscript)):
            if where is not None and isinstance(target.slice, ast.Constant) and target.slice.value == "lr":
                return source.place(where.file, target.lineno)
    return None


def _differ(records: Iterable[dict[str, Any]]) -> bool:
    """By the sum, or by the sum of sizes: a loss over classes leaves the sum of a layer's weights as it was."""
    first, *others = records
    near = 1e-7 * max(first["size"], 1e-30)
    return any(abs(side[name] - first[name]) > near for side in others for name in ("sum", "size"))


def _two(by_rank: _Sides) -> tuple[int, int]:
    first = min(by_rank)
    return first, next(r for r in sorted(by_rank) if r != first and _differ([by_rank[first], by_rank[r]]))
