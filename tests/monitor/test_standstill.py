"""Which rank is behind, told from what the ranks wrote about themselves."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trimtab.monitor.board import Board, Process, RankReport, verdict_in
from trimtab.monitor.standstill import judge

FRESH = 30.0


def own() -> Process:
    found = Process.of(os.getpid())
    assert found is not None
    return found


def waits(name: str, number: int, *, still: bool = True, shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {
        "name": name,
        "number": number,
        "shape": list(shape),
        "seconds": 60.0,
        "waits": still,
        "group": "0",
    }


def report(rank: int, collective: dict[str, Any] | None = None, **more: Any) -> RankReport:
    about = {
        "at": time.time(),
        "step": 12,
        "doing": "step 13",
        "silence": 65.0,
        "place": "load_row (data.py:40)",
    }
    return RankReport(rank, own(), world=4, state="silent", collective=collective, **{**about, **more})


def told(*reports: RankReport) -> dict[int, RankReport]:
    return {each.rank: each for each in reports}


def test_the_rank_outside_the_exchange_is_behind() -> None:
    ranks = [report(rank, waits("all_reduce", 118)) for rank in (0, 2, 3)]
    behind = report(1, waits("all_reduce", 117, still=False), idle=True)
    found = judge(told(*ranks, behind), 4, FRESH)
    assert (found.stuck, found.behind) == (True, (1,))
    assert found.text.startswith(
        "rank 1 is behind: it is in load_row (data.py:40) for 65 s, step 13, and last ended"
    )
    assert found.text.endswith("ranks 0, 2, 3 wait for it in all_reduce #118 of [4]")


def test_a_rank_at_work_makes_it_slow() -> None:
    ranks = [report(rank, waits("all_reduce", 118)) for rank in (0, 2, 3)]
    found = judge(told(*ranks, report(1, idle=False)), 4, FRESH)
    assert (found.stuck, found.behind) == (False, (1,))
    assert "at work" in found.text


def test_the_earlier_exchange_is_behind_and_so_is_the_odd_one_out() -> None:
    ranks = [report(rank, waits("all_reduce", 118)) for rank in (0, 2, 3)]
    assert judge(told(*ranks, report(1, waits("broadcast", 117))), 4, FRESH).behind == (1,)
    assert judge(told(*ranks, report(1, waits("broadcast", 118))), 4, FRESH).behind == (1,)
    two = told(report(0, waits("broadcast", 9)), report(1, waits("all_reduce", 9)))
    found = judge(two, 2, FRESH)
    assert (found.stuck, found.behind) == (True, ())
    assert "rank 0 waits in broadcast #9 of [4]; rank 1 waits in all_reduce #9" in found.text
    assert "different exchanges" in found.text


def test_all_in_one_exchange_is_the_network() -> None:
    found = judge(told(*(report(rank, waits("all_reduce", 5)) for rank in range(4))), 4, FRESH)
    assert (found.stuck, found.behind) == (True, ())
    assert "ranks 0, 1, 2, 3 wait in all_reduce #5" in found.text
    assert "the network between them" in found.text


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (None, "has said nothing"),
        (report(1, at=0.0), "has not answered for 8 min"),
        (dataclasses.replace(report(1), process=Process(own().pid, 1.0, own().host)), "is gone"),
        (dataclasses.replace(report(1), state="failed", error="ValueError: bad row\nmore"), "bad row"),
    ],
)
def test_a_rank_that_cannot_answer(missing: RankReport | None, words: str) -> None:
    others = [report(rank, waits("all_reduce", 5)) for rank in (0, 2, 3)]
    if missing is not None and missing.at == 0.0:
        missing = dataclasses.replace(missing, at=time.time() - 500)
    found = judge(told(*others, *([missing] if missing else [])), 4, FRESH)
    assert (found.stuck, found.behind) == (True, (1,))
    assert words in found.text
    assert "more" not in found.text


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no process is stopped on this system")
def test_a_process_that_is_stopped_or_gone_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process = Process.of(child.pid)
        assert process is not None
        assert process.standing() == "running"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process.standing() == "stopped"
    finally:
        child.kill()
        child.communicate()
    assert process.standing() == "gone"
    assert dataclasses.replace(process, host="another").standing() is None


def test_ranks_speak_by_files_once_the_main_one_has_opened_the_folder(tmp_path: Path) -> None:
    zero, one = (Board(tmp_path, rank, 2) for rank in range(2))
    one.tell(step=3)
    assert list(tmp_path.iterdir()) == [], "nothing is written into a folder that may be refused"
    zero.open()
    one.tell(step=4, collective=waits("barrier", 1))
    read = zero.read()
    assert sorted(read) == [0, 1]
    assert (read[1].step, read[1].process.same(own())) == (4, True)
    before = one.asked()
    assert zero.ask() != before
    assert one.asked() == zero.asked()
    zero.give_verdict("rank 1 is behind")
    assert one.verdict() == (0, "rank 1 is behind")
    assert verdict_in(zero.folder, time.time() + 60) is None, "a verdict of an earlier attempt"
    (zero.folder / "rank1.json").write_text('{"rank": 1}')
    assert sorted(zero.read()) == [0]
    zero.open()
    assert one.verdict() is None
