"""One run at a time in a folder: told by whom, freed by the system, held by no child that outlives the run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.errors import RequestError
from trimtab.recipes import run_lock
from trimtab.recipes.run_lock import Holder, only_run_in, refuse_if_running, running_in
from trimtab.recipes.run_mark import LOCK, Mark, move_aside

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
# Takes the lock, forks a worker as a data loader does, starts a program as a server is, and says their numbers.
HOLDS = """
import os, subprocess, sys, time
from pathlib import Path
from trimtab.recipes.run_lock import only_run_in
with only_run_in(Path(sys.argv[1]), patience=0):
    told, tell = os.pipe()
    worker = os.fork()
    if not worker:
        os.write(tell, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(told, 1)
    server = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(worker, server.pid, flush=True)
    sys.stdin.read()
"""
# Waits for the moment, then takes the lock or says who has it.
RACES = """
import os, sys, time
from pathlib import Path
from trimtab.errors import RequestError
from trimtab.recipes.run_folder import open_run_folder
from trimtab.recipes.run_lock import only_run_in
folder = Path(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    place = folder / line.strip()
    while time.time() < float(place.name):
        pass
    try:
        place.mkdir(exist_ok=True)
        with only_run_in(place, patience=0):
            if (place / "won").exists():
                print("late", flush=True)
            else:
                (place / "won").touch()
                time.sleep(0.02)
                print("won", flush=True)
    except RequestError as error:
        assert "a run is going on there: " in str(error), error
        print("lost", flush=True)
"""


def started(code: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_second_run_is_told_by_whom_the_folder_is_held(tmp_path: Path) -> None:
    with only_run_in(tmp_path, patience=0):
        assert running_in(tmp_path) == Holder.read(tmp_path / LOCK)
        with pytest.raises(RequestError) as refused, only_run_in(tmp_path, patience=0):
            pytest.fail("both hold it")
        me = Holder.me()
        assert f"process {me.pid} on {me.host}, since 20" in str(refused.value)
        assert f"stop it (kill {me.pid})" in str(refused.value)
        refuse_if_running(tmp_path)  # not for itself
    assert running_in(tmp_path) is None
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
    with only_run_in(tmp_path, patience=0):
        assert running_in(tmp_path) is not None


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_killed_run_holds_nothing_though_its_children_live(tmp_path: Path) -> None:
    run = started(HOLDS, str(tmp_path))
    children = [int(pid) for pid in said_by(run).split()]
    try:
        with pytest.raises(RequestError, match=f"process {run.pid} on"), only_run_in(tmp_path, patience=0):
            pytest.fail("it is held")
        run.send_signal(signal.SIGKILL)
        run.wait()
        for child in children:
            os.kill(child, 0)  # they live
        left = (tmp_path / LOCK).read_bytes()
        assert running_in(tmp_path) is None
        with only_run_in(tmp_path, patience=0):
            assert (tmp_path / LOCK).read_bytes() != left
        # Of a run that never began not even the name of the holder before it is changed.
        assert (tmp_path / LOCK).read_bytes() == left
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for pipe in (run.stdin, run.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_child_that_keeps_the_lock_all_the_same_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a library forks by itself would: Python does not hear of it."""
    code = HOLDS.replace(
        "worker = os.fork()",
        "from trimtab.recipes import run_lock; run_lock._HELD.clear()\n    worker = os.fork()",
    )
    run = started(code, str(tmp_path))
    children = [int(pid) for pid in said_by(run).split()]
    try:
        run.send_signal(signal.SIGKILL)
        run.wait()
        with pytest.raises(RequestError) as refused, only_run_in(tmp_path, patience=0):
            pytest.fail("it is held")
        assert f"process {run.pid} on" in str(refused.value)
        assert "gone by now" in str(refused.value)
        assert f"process {children[0]} (python" in str(refused.value)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for pipe in (run.stdin, run.stdout):
            assert pipe is not None
            pipe.close()


def test_of_two_that_start_at_the_same_instant_exactly_one_goes_on(tmp_path: Path) -> None:
    racers = [started(RACES, str(tmp_path)) for _ in range(2)]
    for racer in racers:
        assert said_by(racer) == "ready"
    outcomes = []
    for _ in range(20):
        moment = f"{time.time() + 0.02:.6f}"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(moment + "\n")
            racer.stdin.flush()
        outcomes.append(sorted(said_by(racer) for racer in racers))
    for racer in racers:
        racer.communicate()
    assert all(outcome.count("won") == 1 for outcome in outcomes), outcomes


def test_where_the_file_system_cannot_lock_the_named_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(handle: int, *, shared: bool) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock, "_lock", cannot)
    said: list[str] = []
    with only_run_in(tmp_path, said.append):
        assert "cannot lock" in said[0]
        assert running_in(tmp_path) is not None
        with pytest.raises(RequestError, match="a run is going on there"), only_run_in(tmp_path, said.append):
            pytest.fail("both hold it")
    assert running_in(tmp_path) is None
    # One that was killed is gone; one on another machine cannot be looked for from here.
    told = {"pid": 2**22 + 1, "host": Holder.me().host, "since": 1.0, "born": 1.0}
    (tmp_path / LOCK).write_text(json.dumps(told))
    with only_run_in(tmp_path, said.append):
        pass
    (tmp_path / LOCK).write_text(json.dumps(told | {"host": "elsewhere"}))
    with pytest.raises(RequestError, match="if nothing runs there on elsewhere any more, remove"):
        only_run_in(tmp_path, said.append).__enter__()


def test_a_lock_that_was_left_on_another_machine_is_said_and_taken(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": 1.0, "born": None}))
    said: list[str] = []
    with only_run_in(tmp_path, said.append, patience=0):
        assert "was last held by process 7 on elsewhere" in said[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "\0" * 40])
def test_a_lock_file_that_says_nothing_is_no_obstacle(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(content)
    with only_run_in(tmp_path, patience=0):
        assert running_in(tmp_path) == Holder.read(tmp_path / LOCK)


def test_a_lock_is_never_moved_aside(tmp_path: Path) -> None:
    Mark(("summary.json", LOCK), began=True).write(tmp_path)
    assert Mark.of(tmp_path) is None, "a list with the lock's name on it is not one of ours"
    (tmp_path / "summary.json").write_text("{}")
    Mark(("summary.json",), began=True).write(tmp_path)
    with only_run_in(tmp_path, patience=0):
        kept = Mark.of(tmp_path)
        assert kept is not None
        aside = move_aside(tmp_path, kept)
        assert (tmp_path / LOCK).is_file()
        assert not (aside / LOCK).exists()


def test_a_run_that_goes_on_may_be_looked_at_but_not_joined(
    trimtab: Trimtab, tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 0.0)
    run = tmp_path / "run"
    words = [
        f"model={tiny_model}",
        f"data={tiny_rows}",
        f"output_dir={run}",
        "device=cpu",
        "data.eval_fraction=0",
    ]
    words += ["training.max_steps=1", "training.batch_size=2", "monitor.progress=none", "samples.prompts=[]"]
    (tmp_path / "base.yaml").write_text("recipe: sft")
    start = ["train", str(tmp_path / "base.yaml"), *words]
    assert trimtab(*start).returncode == 0
    assert not (run / LOCK).exists()
    other = started(HOLDS, str(run))
    children = [int(pid) for pid in said_by(other).split()]
    try:
        for more in (["overwrite=true"], ["training.resume=true"]):
            done = trimtab(*start, *more)
            assert done.returncode == 2
            assert f"a run is going on there: process {other.pid} on" in done.stderr
        assert not list(run.glob("replaced-*"))
        for words in (
            ["export", str(run), "--to", "merged"],
            ["evaluate", str(run), "--data", str(tiny_rows)],
        ):
            done = trimtab(*words)
            assert done.returncode == 2, done.stderr
            assert f"a run is going on there: process {other.pid} on" in done.stderr
        assert not (run / "export").exists()
        assert trimtab("report", str(run)).returncode == 0
        done = trimtab("export", str(run), "--to", "merged", "--out", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr
        assert "this is what it had kept before" in done.stderr
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        other.communicate()


def test_two_runs_without_a_name_in_the_same_second_take_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.config import load_config
    from trimtab.recipes.run_folder import make_default_folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    config = load_config(None, [])
    names = [make_default_folder(config) for _ in range(3)]
    assert names == ["runs/sft-smollm2-now", "runs/sft-smollm2-now-2", "runs/sft-smollm2-now-3"]
