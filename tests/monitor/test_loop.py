"""The monitor of a loop of our own: what it writes, what it shows, and that it lets go."""

from __future__ import annotations

import json
import math
import re
import threading
from pathlib import Path

import pytest

from trimtab.config.schema import MonitorSettings
from trimtab.monitor import readings
from trimtab.monitor.loop import LoopMonitor
from trimtab.virtual import virtual_gpus


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def watchdogs() -> int:
    return sum(thread.name == "trimtab-watchdog" for thread in threading.enumerate())


def test_a_run_is_written_down_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LoopMonitor(MonitorSettings(progress="plain"), tmp_path, "cpu") as monitor:
        monitor.begin(0, 3)
        assert watchdogs() == 1
        monitor.evaluating(1, 1)
        monitor.evaluated(0, {"loss": 2.5, "accuracy": 0.5})
        for step in (1, 2, 3):
            values = {"loss": 3.0 - step / 2, "learning_rate": 0.1, "forwards": 2 * step}
            monitor.step(step, values, (f"forwards {2 * step}",), log=step != 2)
        monitor.saved(3)
        monitor.end()
    assert watchdogs() == 0
    found = lines(tmp_path)
    assert [(line["step"], line["phase"]) for line in found] == [
        (0, "eval"),
        (1, "train"),
        (3, "train"),
        (3, "save"),
    ]
    assert found[0]["eval_accuracy"] == 0.5
    assert found[2]["forwards"] == 6
    assert found[2]["steps_per_second"]
    shown = capsys.readouterr().err
    assert "evaluation after step 0: loss 2.5, accuracy 0.5" in shown
    assert "forwards 6" in shown
    assert "trained 3 steps" in shown
    assert "loss 2.5 → 1.5" in shown
    assert re.search(r"^first step on cpu: .+; then about .+ a step \(about .+ left\)$", shown, re.MULTILINE)
    assert re.search(r"^checkpoint-3 saved \(.+\)$", shown, re.MULTILINE)
    assert "tokens/s" not in shown


@pytest.mark.parametrize("shapes", [False, True])
def test_figures_that_nobody_computed_are_warned_of_by_nobody(
    shapes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        virtual_gpus(1, shapes=shapes),
        LoopMonitor(MonitorSettings(progress="plain"), tmp_path, "cuda:0") as monitor,
    ):
        monitor.begin(0, 8)
        for step in range(1, 9):
            monitor.logged(step, {"loss": 1.0, "learning_rate": 0.1})
        monitor.end()
    assert ("the loss has been 1 for" in capsys.readouterr().err) is not shapes


def test_a_virtual_gpu_has_no_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        virtual_gpus(1),
        LoopMonitor(MonitorSettings(progress="plain"), tmp_path, "cuda:0") as monitor,
    ):
        monitor.begin(0, 3)
        monitor.first_begins()
        for step in (1, 2, 3):
            monitor.step_done(step)
            monitor.logged(step, {"loss": 1.0, "learning_rate": 0.1}, tokens=100 * step, flops=1e12 * step)
        monitor.write(3, "eval", {"eval_loss": 0.5, "eval_runtime": 1.0, "eval_samples_per_second": 8.0})
        monitor.end()
    shown = capsys.readouterr().err
    assert re.search(
        r"^step 2/3  loss 1  lr 1.00e-01  memory [^ ]+ [^ ]+  elapsed \d+:\d\d$", shown, re.MULTILINE
    )
    assert "trained 3 steps" in shown
    assert "a step" not in shown
    *trained, evaluated = lines(tmp_path)
    for line in trained:
        assert line["elapsed_seconds"] is not None
        assert not {"tokens_per_second", "steps_per_second", "mfu"} & line.keys()
    assert evaluated["eval_runtime"] == 1.0
    assert "eval_samples_per_second" not in evaluated


def test_a_loop_is_told_what_a_trainer_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = MonitorSettings(progress="plain")
    with LoopMonitor(settings, tmp_path, "cpu", devices=("cpu", "meta")) as monitor:
        monitor.begin(0, 2)
        for step in (1, 2):
            values = {"loss": 1.0, "learning_rate": 0.1, "num_tokens": 100 * step}
            monitor.step(step, values, log=True)
            monitor.saved(step)
        monitor.evaluated(2, {"loss": math.nan, "accuracy": 0.5})
        monitor.end()
    found = lines(tmp_path)
    assert found[0]["memory_bytes/cpu"]
    assert "memory_bytes/meta" in found[0]
    assert found[0]["tokens_per_second"]
    shown = capsys.readouterr().err
    assert "tokens/s" in shown
    assert shown.count(" saved (") == 1, "at most one line a minute"
    assert "warning: loss is nan after step 2" in shown
    assert found[-1]["eval_loss"] == "nan"


def test_a_resumed_run_cuts_what_it_makes_again(tmp_path: Path) -> None:
    values = {"loss": 1.0, "learning_rate": 0.1}
    with LoopMonitor(MonitorSettings(progress="none"), tmp_path, "cpu") as monitor:
        monitor.begin(0, 4)
        for step in (1, 2, 3):
            monitor.step(step, values, log=True)
    with LoopMonitor(MonitorSettings(progress="none"), tmp_path, "cpu") as monitor:
        monitor.begin(2, 4)
        monitor.step(3, values, log=True)
    assert [line["step"] for line in lines(tmp_path) if line["phase"] == "train"] == [1, 2, 3]


def test_an_error_leaves_no_watchdog_and_other_ranks_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the other process would send: the same again.
    monkeypatch.setattr(
        readings.dist, "all_gather_object", lambda into, mine: into.__setitem__(slice(None), [mine] * 2)
    )

    def failing() -> None:
        with LoopMonitor(MonitorSettings(progress="none"), tmp_path, "cpu", 1, 2) as monitor:
            monitor.begin(0, 2)
            monitor.step(1, {"loss": 1.0, "learning_rate": 0.1}, log=True)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        failing()
    assert watchdogs() == 0
    assert not (tmp_path / "metrics.jsonl").exists()
