"""A run that its launcher begins again: whose folder it is, which step it keeps, what is not tried again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import dump_config, load_config
from trimtab.errors import RequestError, TrimtabError
from trimtab.hardware import Launcher
from trimtab.monitor.board import FOLDER, Board
from trimtab.recipes.elastic import (
    begun_by_this_launch,
    keep_the_step,
    note_failure,
    refuse_what_came_again,
    restart_number,
)
from trimtab.recipes.ranks_ended import is_felt
from trimtab.recipes.run_folder import RunFolder, check_room
from trimtab.recipes.run_mark import Mark


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    monkeypatch.delenv("TRIMTAB_RESTART", raising=False)


@pytest.mark.usefixtures("torchrun")
def test_only_the_launch_that_began_a_run_goes_on_with_it_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, [f"output_dir={tmp_path}"])
    assert not begun_by_this_launch(config)
    Board(tmp_path, 0, 2).open()
    assert begun_by_this_launch(config)
    Mark(("plan.json",), began=True).write(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(RequestError, match="already holds a run"):
        check_room(RunFolder(tmp_path), config)
    check_room(RunFolder(tmp_path, again=True), config)
    other = tmp_path / FOLDER / "rank0.json"
    found = json.loads(other.read_text())
    found["agent"]["started"] -= 1000  # another process that had the same number
    other.write_text(json.dumps(found))
    assert not begun_by_this_launch(config)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not begun_by_this_launch(config)


def begun(folder: Path, processes: int, strategy: str = "data_parallel") -> None:
    config = load_config(None, [f"output_dir={folder}", "training.batch_size=2"])
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "plan.json").write_text(json.dumps({"processes": processes, "strategy": strategy}))


def test_fewer_processes_keep_the_rows_of_a_step_or_are_refused(tmp_path: Path) -> None:
    config = load_config(None, [f"output_dir={tmp_path}", "training.batch_size=2"])
    begun(tmp_path, 2)
    assert keep_the_step(config, Launcher(name="torchrun", world_size=2)) is None
    said = keep_the_step(config, Launcher(name="torchrun", world_size=1))
    assert said is not None
    assert "keeps its 4 rows" in said
    assert config.training.gradient_accumulation_steps == 2
    with pytest.raises(RequestError, match="does not divide"):
        keep_the_step(config, Launcher(name="torchrun", world_size=3))
    begun(tmp_path, 2, "sharded")
    with pytest.raises(RequestError, match="sharded"):
        keep_the_step(config, Launcher(name="torchrun", world_size=1))


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert restart_number() == attempt
        refuse_what_came_again(tmp_path)
        note_failure(tmp_path, ValueError("bad row"), 1, 12)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(TrimtabError, match="failed twice at step 12 with the same error") as caught:
        refuse_what_came_again(tmp_path)
    assert caught.value.exit_code == 1
    note_failure(tmp_path, RequestError("no such data"), 0, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with pytest.raises(RequestError, match="no such data"):
        refuse_what_came_again(tmp_path)


def test_what_is_felt_of_another_rank_is_told_from_an_own_error() -> None:
    assert is_felt(RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"))
    assert not is_felt(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_felt(ConnectionResetError("Connection reset by peer"))  # a server of somebody else's


STUCK_IN_C = """
import hashlib, signal, sys
from trimtab.recipes import second_signal
from trimtab.monitor.last_words import on_sudden_end

second_signal._GRACE_SECONDS = 0.3
signal.signal(signal.SIGTERM, lambda *_: None)
on_sudden_end(lambda error: print("kept", type(error).__name__, flush=True), lambda: "the way on")
with second_signal.SecondSignal(print):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM is sent there")
def test_a_second_signal_ends_a_process_whose_main_thread_is_inside_a_call() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK_IN_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert said == "kept KeyboardInterrupt\n"
    assert error == "stopped at once, by a second SIGTERM; the way on\n"
