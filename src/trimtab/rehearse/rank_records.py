"""What the comparisons of ranks share: the records by rank, and the questions that all of them ask (by the parent).

It decides nothing by itself: whether ranks train apart is for `apart_ranks` and `diverged`, whether they read the same
rows for `same_rows`.
"""

from __future__ import annotations

import ast
from typing import Any

from trimtab.diagnose import source

Records = dict[int, list[dict[str, Any]]]
TENSOR_PARALLEL = "tensor parallel"
"""The reason by which ranks may differ, or read alike, where they share the layers of one model."""
_NEAR = 1e-6
_AVERAGERS = {"LocalSGD", "PeriodicModelAverager", "HierarchicalModelAverager", "PostLocalSGDOptimizer"}
_AVERAGERS |= {"DiLoCo"}
_EXCHANGES = {"all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single"}
_EXCHANGES |= {"reduce", "gather", "reduce_scatter", "reduce_scatter_tensor", "average_parameters"}
_EXCHANGES |= {"send", "recv", "all_reduce_coalesced"}
_WEIGHTS = ("parameters(", ".grad", "state_dict(", ".data")


def vetoed(ranks: Records) -> bool:
    """Whether ranks may differ on purpose."""
    return any("veto" in record for records in ranks.values() for record in records)


def only_tensor_parallel(ranks: Records) -> bool:
    """Whether all ranks are one tensor-parallel group, and nothing else sets them apart on purpose."""
    reasons = {record["veto"] for records in ranks.values() for record in records if "veto" in record}
    heads = [record for records in ranks.values() for record in records if "optimizer" in record]
    return reasons == {TENSOR_PARALLEL} and all(head["tensor"] for head in heads)


def other_rows(ranks: Records, enough: int) -> dict[str, Any] | None:
    """The loader that gave every rank other rows in each of so many steps, where the model was fed with them."""
    steps: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for rank, records in ranks.items():
        for record in records:
            if "rows" in record:
                steps.setdefault((record["rows"], record["n"]), {})[rank] = record
    common = [list(sides.values()) for sides in steps.values() if len(sides) == len(ranks)]
    if len(common) < enough:
        return None
    apart = all(
        other[name] and other[name] != sides[0][name]
        for sides in common
        for other in sides[1:]
        for name in ("seen", "fed")
    )
    loader: dict[str, Any] = common[0][0]["loader"]
    return loader if apart else None


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
        a is None or b is None or near([a[2:], b[2:]])
        for mine in first
        for one, other in zip(mine, first[0], strict=False)
        for a, b in zip(one["sums"], other["sums"], strict=False)
    )


def near(sides: list[list[float]]) -> bool:
    """Whether checksums (sum, and sum of sizes) of several ranks are the same."""
    return all(
        abs(total - sides[0][0]) <= _NEAR * max(size, sides[0][1])
        and abs(size - sides[0][1]) <= _NEAR * max(size, sides[0][1])
        for total, size in sides
    )


def lines_that_ran(ranks: Records) -> set[tuple[str, int]]:
    """The lines of the program that have exchanged something."""
    return {(r["file"], r["ran"]) for records in ranks.values() for r in records if "ran" in r}


def averages_elsewhere(file: str, ran: set[tuple[str, int]], words: tuple[str, ...] = _WEIGHTS) -> bool:
    """Whether a file holds an exchange of weights or gradients to which this run has not come."""
    for call in source.calls(file):
        name = source.called_name(call)
        if name in _AVERAGERS:
            return True
        if name in _EXCHANGES and (file, call.lineno) not in ran:
            around = _innermost(file, call.lineno)
            text = ast.unparse(around) if around is not None else ""
            if any(word in text for word in words):
                return True
    return False


def _innermost(file: str, line: int) -> ast.AST | None:
    kinds = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    around = [
        n for n in source.walk(file) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)
    ]
    return max(around, key=lambda n: n.lineno, default=None)
