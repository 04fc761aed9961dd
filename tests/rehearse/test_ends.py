"""Ends that say nothing about the program: ranks aborted after their end, things that virtual GPUs lack."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trimtab.rehearse import run, system, waiting
from trimtab.rehearse.session import VARIABLE, Recorder, Settings
from trimtab.rehearse.standstill import Standstill
from trimtab.virtual.ending import settle

PROGRAMS = Path(__file__).parent / "programs"
Rehearse = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(("end", "verdict"), [("abort", "clean"), ("exit", "fault")])
def test_a_launched_rank_that_is_aborted_after_its_end_did_not_fail(
    rehearse_warm: Rehearse, end: str, verdict: str
) -> None:
    report = rehearse_warm(str(PROGRAMS / "launches.py"), end)
    assert "rank 0 of 1" in report["stdout"]
    assert report["verdict"] == verdict, report["text"]


@pytest.mark.slow
def test_a_launched_rank_that_comes_late_is_waited_for(rehearse: Rehearse) -> None:
    report = rehearse(str(PROGRAMS / "launches.py"), "wait")
    assert report["verdict"] == "clean", report["text"]


def test_what_is_not_simulated_is_no_fault(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.cuda.CUDAGraph()\n")
    report = rehearse_warm(str(script))
    assert (report["verdict"], report["exit"], report["findings"]) == ("unproven", 3, [])
    assert any("CUDAGraph is not simulated" in note for note in report["notes"])


def test_ctrl_c_tells_what_was_seen_and_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(64, 64).cuda()\n"
        "with torch.no_grad(): model(torch.ones(4, 64, device='cuda'))\n"
        "open('begun', 'w').close()\nwhile True:\n    time.sleep(0.05)\n"
    )
    monkeypatch.chdir(tmp_path)

    def interrupted(children: list[waiting.Child], deadline: float, folder: Path, room: object) -> None:
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "wait", interrupted)
    result = run.rehearse([str(script)], Settings(), in_place=True, tells_stopped=True)
    assert (result.verdict, result.exit_code, result.stopped) == ("unproven", 3, True)
    assert any(note.startswith("you stopped it after") and "script.py:6" in note for note in result.notes)
    assert [phase["name"] for phase in result.memory["cuda:0"]["phases"]] == ["load", "evaluate"]
    with pytest.raises(KeyboardInterrupt):
        run.rehearse([str(script)], Settings(), in_place=True)


def test_a_process_killed_after_its_end_had_ended(tmp_path: Path) -> None:
    died = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL)
    died.wait()
    assert died.returncode == -signal.SIGABRT
    assert not waiting.had_ended(tmp_path, died)
    record = {"t": "end", "pid": died.pid, "how": "done", "status": 0}
    (tmp_path / f"records-{died.pid}.jsonl").write_text(json.dumps(record) + "\n")
    assert waiting.had_ended(tmp_path, died)


def test_the_end_waits_for_threads_that_still_run() -> None:
    started, done = threading.Event(), []

    def work() -> None:
        started.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without Python's lock, as gloo's threads
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    settle(most=120)
    assert done
    thread.join()


def test_whether_a_process_sleeps_and_whose_it_is(tmp_path: Path) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: str(tmp_path)})
    try:
        until = time.monotonic() + 60
        while not system.sleeps(idle.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert system.sleeps(idle.pid)
        assert not system.sleeps(busy.pid)
        assert system.belongs(tmp_path, idle.pid)
        assert not system.belongs(tmp_path, busy.pid)
        assert busy.pid in dict(system.processes())
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    assert system.processor_seconds(busy.pid) is None


def test_worlds_of_different_sizes_are_looked_at_apart(tmp_path: Path) -> None:
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    try:
        for world, size in (("a", 3), ("b", 2)):
            for rank in range(size):
                path = tmp_path / f"collectives-{world}-{rank}.jsonl"
                path.write_text(json.dumps({"pid": sleepers[rank].pid}) + "\n")
                os.utime(path, (0, 0))
        look = Standstill(tmp_path)
        for now in (10.0, 11.0):
            assert look._look("a", now) is None
            assert look._look("b", now) is None
        # After three seconds they are asked where they stand: these are no ranks, and know no answer.
        assert look._look("a", 14.0) is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_a_recorder_can_be_used_after_a_fork_in_the_middle_of_a_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with recorder._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        recorder.write(t="note", text="from the child")
        os._exit(0)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert "from the child" in (tmp_path / f"records-{child}.jsonl").read_text()


def test_a_gather_of_shards_that_one_rank_makes_alone_is_told_by_its_guard(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        'dist.init_process_group("nccl")\nrank = dist.get_rank()\ntorch.cuda.set_device(rank)\n'
        "model = torch.nn.Linear(4, 4).cuda()\nfully_shard(model)\n"
        "model(torch.ones(2, 4).cuda()).sum().backward()\n"
        "if rank == 0:\n    state = model.weight.full_tensor()\n    print(state.shape)\n"
        "dist.destroy_process_group()\n"
    )
    report = rehearse_warm(str(script), ranks=2)
    (finding,) = report["findings"]
    assert finding["kind"] == "ranks-disagree", report["text"]
    assert finding["cause"]["line"] == 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_rehearsal_leaves_no_process_and_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    # A process below the script's own, in a session of its own, as a launcher starts them.
    script.write_text(
        "import os, subprocess, sys, time\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'told')!r}, 'w').write(f'{{os.getpid()}} {{below.pid}}')\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "trimtab", "rehearse", "--in-place", str(script)]
    rehearsal = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    told = tmp_path / "told"
    _until(lambda: told.exists() and len(told.read_text().split()) == 2)
    assert list(tmp_path.glob("trimtab-rehearsal-*"))
    rehearsal.send_signal(number)
    rehearsal.wait()
    for process in map(int, told.read_text().split()):
        _until(
            lambda process=process: (
                not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie"
            )
        )
    _until(lambda: not list(tmp_path.glob("trimtab-rehearsal-*")))


def _until(holds: Callable[[], bool]) -> None:
    """Wait for it; the suite's own time limit ends a wait in vain."""
    while not holds():
        time.sleep(0.05)
