"""Real ranks that are killed or stopped while they train, under our torchrun and the user's own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 280


@pytest.fixture
def settings(tiny_model: Path, tiny_rows: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "plain.yaml").write_text("recipe: sft\n")
    return [
        *("train", str(tmp_path / "plain.yaml"), f"model={tiny_model}", f"data={tiny_rows}", "device=cpu"),
        *("monitor.progress=plain", "training.batch_size=2", "training.save_steps=5"),
        *("training.learning_rate=0.001", "training.keep_best=false", f"output_dir={tmp_path / 'run'}"),
    ]


def start(command: list[str], said: Path) -> psutil.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with said.open("w") as file:
        return psutil.Popen(
            [sys.executable, "-m", *command], stdout=file, stderr=subprocess.STDOUT, env=env, cwd=said.parent
        )


def losses(run: Path) -> dict[int, float]:
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return {}
    return {line["step"]: line["loss"] for line in lines if line["phase"] == "train"}


def rank_at(run: Path, rank: int, step: int, process: psutil.Popen) -> int:
    """The rank's process, once so many steps are done."""
    until = time.monotonic() + SECONDS
    while max(losses(run), default=0) < step:
        assert process.poll() is None, "it ended before that step"
        assert time.monotonic() < until, "the step was not reached"
        time.sleep(0.1)
    found: dict[str, Any] = json.loads((run / ".trimtab-ranks" / f"rank{rank}.json").read_text())
    return int(found["process"]["pid"])


def end(process: psutil.Popen) -> None:
    if process.is_running():
        for each in [*process.children(recursive=True), process]:
            each.kill()
    process.wait()


@pytest.mark.parametrize("own", [True, False], ids=["trimtab train", "torchrun"])
def test_a_rank_that_is_killed_is_begun_again(settings: list[str], tmp_path: Path, own: bool) -> None:
    run, said = tmp_path / "run", tmp_path / "said.txt"
    words = [*settings, "training.max_steps=60"]
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "-m",
        "trimtab",
    ]
    process = start(["trimtab", *words, "processes=2"] if own else [*torchrun, *words], said)
    try:
        os.kill(rank_at(run, 1, 12, process), signal.SIGKILL)
        assert process.wait(SECONDS) == 0, said.read_text()
    finally:
        end(process)
    assert json.loads((run / "summary.json").read_text())["steps"] == 60
    text = said.read_text()
    assert "begun again by the launcher" in text
    if own:
        assert "was ended by SIGKILL" in text
        assert "Traceback" not in text
    else:
        assert "is gone without a word" in text
    again = losses(run)
    whole = [*words[:-2], f"output_dir={tmp_path / 'whole'}", "training.max_steps=60", "processes=2"]
    other = start(["trimtab", *whole], tmp_path / "whole.txt")
    assert other.wait(SECONDS) == 0
    assert again == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_a_stopped_rank_is_named_and_the_run_ends(settings: list[str], tmp_path: Path) -> None:
    run, said = tmp_path / "run", tmp_path / "said.txt"
    words = [*settings, "training.max_steps=100000", "processes=2", "monitor.on_stuck=stop"]
    words += ["monitor.slow_after_seconds=3", "monitor.stuck_after_seconds=8"]
    process = start(["trimtab", *words], said)
    try:
        rank = rank_at(run, 1, 12, process)
        os.kill(rank, signal.SIGSTOP)
        assert process.wait(SECONDS) == 1
    finally:
        end(process)
    last = said.read_text().splitlines()[-3:]
    assert last[0].startswith("error: the run is stuck: nothing finished for ")
    assert f"rank 1 is behind: process {rank} on " in last[0]
    assert "is stopped (SIGSTOP" in last[0]
    assert "rank 0 waits for it in " in last[0]
    assert "training.resume=true" in last[2]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["error"]["kind"]) == ("failed", "StuckError")
    assert summary["checkpoint"] is not None
    assert "in _watch" not in (run / "stacks.txt").read_text()
    assert not psutil.pid_exists(rank)


def test_the_loss_of_one_of_two_agents_is_survived_by_the_other(settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = [
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-id=two",
    ]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--local-addr=127.0.0.1"]
    agent += ["--rdzv-conf=last_call_timeout=10", "-m", "trimtab", *settings, "training.max_steps=60"]
    first = start(agent, tmp_path / "said-0.txt")
    time.sleep(1.0)  # whoever comes first keeps the meeting place, and must be the one that stays
    second = start(agent, tmp_path / "said-1.txt")
    try:
        rank_at(run, 1, 12, first)
        for process in [*second.children(recursive=True), second]:
            process.kill()
        assert first.wait(SECONDS) == 0, (tmp_path / "said-0.txt").read_text()
    finally:
        end(first)
        end(second)
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert json.loads((run / "plan.json").read_text())["processes"] == 1
    said = (tmp_path / "said-0.txt").read_text() + (tmp_path / "said-1.txt").read_text()
    assert "a step keeps its 4 rows, with training.gradient_accumulation_steps=2" in said
