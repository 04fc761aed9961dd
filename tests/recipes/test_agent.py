"""Which rank ended a run, and whether it is begun again."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from trimtab.recipes.agent import Ended, first_of


def failure(code: int, at: float, **own: Any) -> SimpleNamespace:
    data = {"message": "", **({"trimtab": {"at": at, **own}} if own else {})}
    return SimpleNamespace(pid=100, exitcode=code, timestamp=int(at), error_file_data=data)


def test_a_rank_that_only_felt_it_is_not_the_cause() -> None:
    felt = failure(1, 10.2, kind="LostRank", text="rank 0 stops", felt=True)
    ended = first_of({0: felt, 1: failure(-signal.SIGKILL, 11.0)})
    assert (ended.rank, ended.again) == (1, True)
    assert ended.words().startswith("rank 1 (process 100 on ")
    assert "ended by SIGKILL" in ended.words()
    early, late = (
        failure(1, 10.1, kind="ValueError", text="bad row", step=12),
        failure(1, 10.9, kind="E", text="x"),
    )
    cause = first_of({0: late, 1: early, 2: felt})
    assert cause.rank == 1
    assert cause.words().endswith("failed after step 12: ValueError: bad row")
    assert first_of({0: felt}).rank == 0


def test_what_would_come_again_is_not_tried_again() -> None:
    assert not Ended(0, 1, 2, {}).again, "the request is wrong"
    assert not Ended(0, 1, 1, {"kind": "StuckError", "comes_again": True}).again
    assert not Ended(0, 1, 1, {"interrupted": True}).again
    bad = {"kind": "ValueError", "text": "bad row", "step": 12}
    assert Ended(1, 1, 1, bad).again
    assert Ended(1, 1, 1, bad).alike(Ended(0, 2, 1, dict(bad)))
    assert not Ended(1, 1, 1, bad).alike(Ended(1, 1, 1, {**bad, "step": 13}))
    killed = Ended(1, 1, -9, {})
    assert not killed.alike(killed), "nothing tells whether it was the same"
    assert Ended(1, 1, 7, {}).words().endswith("ended with exit code 7")
