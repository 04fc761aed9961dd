"""Figures that are logged a step later: under their own step, all of them, and never behind a checkpoint."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.recipes.late_logs import LateLogs
from trimtab.recipes.sft_trainer import SftTrainer

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def test_each_is_read_in_the_next_step_as_of_its_own() -> None:
    state = SimpleNamespace(global_step=0, epoch=0.0)
    logs, seen = LateLogs(state, late=True), []
    for step in (1, 2, 3):
        state.global_step, state.epoch = step, step / 4
        logs.send(
            [torch.tensor(step * 2.0), torch.tensor(7)],
            lambda read: seen.append((state.global_step, state.epoch, *read)),
        )
        assert len(seen) == step - 1
    assert state.global_step == 3
    logs.flush()
    assert seen == [(1, 0.25, 2.0, 7.0), (2, 0.5, 4.0, 7.0), (3, 0.75, 6.0, 7.0)]


def test_of_a_bad_step_nothing_is_logged() -> None:
    state, seen = SimpleNamespace(global_step=4, epoch=1.0), []
    logs = LateLogs(state, late=True)
    logs.send([torch.tensor(1.0)], seen.append)
    logs.flush(before=4)
    logs.flush()
    assert seen == []


def lines(run: Path) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "elapsed_seconds", "steps_per_second", "tokens_per_second")
    return [
        {
            name: value
            for name, value in line.items()
            if name not in timed
            and "memory" not in name
            and "runtime" not in name
            and "per_second" not in name
        }
        for line in told
    ]


def test_a_run_that_logs_late_writes_the_same(
    trimtab: Trimtab, tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        *(
            f"model={tiny_model}",
            f"data={tiny_rows}",
            "device=cpu",
            "monitor.progress=none",
            "samples.prompts=[]",
        ),
        *("training.max_steps=5", "training.batch_size=4", "training.eval_steps=2", "training.save_steps=3"),
        *("training.keep_best=false", "data.max_length=64"),
    ]
    for name, late in (("now", False), ("late", True)):
        monkeypatch.setattr(SftTrainer, "logs_late", late)
        done = trimtab("train", *words, f"output_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    now, late_lines = lines(tmp_path / "now"), lines(tmp_path / "late")
    trained = [line for line in now if line["phase"] == "train"]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5]
    assert {"loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "mean_token_accuracy"} <= set(
        trained[0]
    )
    assert late_lines == now
    states = [
        json.loads((tmp_path / n / "checkpoints/checkpoint-5/trainer_state.json").read_text())
        for n in ("now", "late")
    ]
    histories = [
        [(entry["step"], entry.get("loss"), entry.get("num_tokens")) for entry in s["log_history"]]
        for s in states
    ]
    assert histories[0] == histories[1]
    assert states[1]["num_input_tokens_seen"] == trained[-1]["num_tokens"] > 0
