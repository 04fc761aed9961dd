"""What several ranks do at once, or one alone, told from what they wrote down; and what may differ by right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.diagnose import answers, branches, rewrite
from trimtab.rehearse import alone, diverged

PROGRAM = """import torch
import torch.distributed as dist
def save(model, path):
    torch.save(model.state_dict(), path)
def follow(rank, model, teacher):
    if rank == 0:
        teacher.update(model)
def keep(model, path, lock):
    with FileLock(lock):
        torch.save(model.state_dict(), path)
def watch(model, device, best):
    for step in range(9):
        current = model(step).item()
        if current < best:
            best = current
            validate(model)
        model(step).backward()
"""


def _run(tmp_path: Path, *ranks: list[dict[str, Any]]) -> list[Any]:
    for rank, records in enumerate(ranks):
        lines = [json.dumps(record) + "\n" for record in records]
        (tmp_path / f"collectives-world-{rank}.jsonl").write_text("".join(lines))
    return alone.found(tmp_path)


def _file(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def _saved(file: str, line: int, after: int) -> dict[str, Any]:
    place = {"file": file, "line": line, "code": ""}
    return {"saved": "/runs/last.pt", "after": {"0": after}, "place": place, "way": [[file, line]]}


def test_one_file_for_all_ranks(tmp_path: Path) -> None:
    file = _file(tmp_path)
    (found,) = _run(tmp_path, [_saved(file, 4, 7)], [_saved(file, 4, 7)])
    assert found.cause.line == 4
    after = rewrite.applied(PROGRAM, found.edits)
    assert "    if dist.get_rank() == 0:\n        torch.save(model.state_dict(), path)\n" in after
    # The weights of a sharded model are gathered by all.
    (found,) = _run(tmp_path, [_saved(file, 4, 7), {"sharded": True}], [_saved(file, 4, 7)])
    after = rewrite.applied(PROGRAM, found.edits)
    assert "    state = model.state_dict()\n    if dist.get_rank() == 0:\n        torch.save(state" in after
    # One after the other, with a barrier between them, or a lock.
    assert not _run(tmp_path, [_saved(file, 4, 7)], [_saved(file, 4, 8)])
    assert not _run(tmp_path, [_saved(file, 10, 7)], [_saved(file, 10, 7)])


def test_a_teacher_that_one_rank_follows(tmp_path: Path) -> None:
    file = _file(tmp_path)

    def runs(total: float, way: list[list[Any]]) -> list[dict[str, Any]]:
        return [
            {"copy": "Net x", "n": n, "sums": [total, 9.0], "written": way, "place": None} for n in (2, 4, 8)
        ]

    way = [[file, 7]]
    (found,) = _run(tmp_path, runs(1.0, way), runs(2.0, []))
    assert found.cause.line == 6
    # Shared before it is run; written by all; run by one rank alone.
    assert not _run(tmp_path, runs(1.0, way), runs(1.0, []))
    assert not _run(tmp_path, runs(1.0, way), runs(2.0, way))
    assert not _run(tmp_path, runs(1.0, way), [])


def test_a_branch_on_a_figure_that_it_sets_anew(tmp_path: Path) -> None:
    file = _file(tmp_path)
    # Who went in has lowered `best` since: now both would say no.
    values = [[{"at": [file, 11], "known": {"current": c, "best": b}}] for c, b in ((0.5, 0.5), (0.9, 0.7))]
    sides = answers.sides((0, values[0]), (1, values[1]))
    found = branches.guard([(file, 16)], [(file, 17)], sides)
    assert found is not None
    assert found.cause is not None
    assert found.cause.line == 14
    assert "flag = torch.tensor(float(current < best), device=device)" in rewrite.applied(
        PROGRAM, found.edits
    )


def test_ranks_that_differ_by_right(tmp_path: Path) -> None:
    """Unequal numbers of steps inside join(), and buffers that the program brings together itself, are no drift."""
    file = _file(tmp_path)
    pair: dict[str, Any] = {"group": [0, 1], "size": 9.0}
    known = {
        **pair,
        "place": None,
        "averaged": False,
        "kept": {"mean": [[file, 4]]},
        "began": {"mean": [0.0, 0.0]},
    }

    def steps(weight: float, mean: float) -> list[dict[str, Any]]:
        step = {**known, "model": "0:[0]", "sum": weight, "buffers": {"mean": [mean, mean]}}
        return [{**step, "step": n} for n in range(1, 7)]

    joins, brought = {"own_way": "0", "why": "joins"}, {"brought": ["mean"]}
    ends = [{**pair, "model": "0:end", "step": 9, "sum": n} for n in (1.0, 2.0)]
    assert (
        diverged.found({0: [*steps(1.0, 0.0), joins, ends[0]], 1: [*steps(2.0, 0.0), joins, ends[1]]}) is None
    )
    apart = {0: steps(1.0, 1.0), 1: steps(1.0, 2.0)}
    assert diverged.found(apart) is not None
    apart[0].append(brought)
    assert diverged.found(apart) is None
