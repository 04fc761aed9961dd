"""A run that fails says so in its folder: the reason, the step, the checkpoint; and it can go on from there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimtab.config import load_config
from trimtab.errors import RequestError, TrimtabError
from trimtab.export.finished import read_run as read_for_export
from trimtab.placement import PlacementPlan
from trimtab.recipes.run_folder import RunFolder, failure_kept, open_run_folder
from trimtab.report.make import make_report

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
KEY = "hf_" + "aB3" * 11

REWARD = f"""
import os

def breaks(completions, trainer_state, **columns):
    mine = os.environ.get("BREAKS_ON") in (None, os.environ.get("RANK"))
    if mine and trainer_state is not None and trainer_state.global_step >= 2:
        raise ValueError("the judge at https://me:hunter2@judge/ refused {KEY}")
    return [float(len(completions[0][0]["content"]))] * len(completions)

def sound(completions):
    return [float(len(completion[0]["content"])) for completion in completions]
"""


def summary_of(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a weight that is not a number."""
    folder = tmp_path / "broken-model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def grpo(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    name = f"failing_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "grpo.yaml").write_text(
        f"recipe: grpo\nmodel: {tiny_model}\ndata: {{source: sums, max_rows: 16, max_length: 96}}\n"
        f"reward: {name}:breaks\ngrpo: {{num_generations: 4, max_completion_length: 6}}\ndevice: cpu\n"
        "training: {max_steps: 4, batch_size: 4, save_steps: 1, learning_rate: 0.01}\n"
        f"monitor: {{progress: none}}\noutput_dir: {tmp_path / 'run'}\n"
    )
    return ["train", str(tmp_path / "grpo.yaml")]


def test_a_reward_that_breaks_is_told_and_the_run_goes_on(
    grpo: list[str], trimtab: Trimtab, tmp_path: Path
) -> None:
    done = trimtab(*grpo, cwd=tmp_path)
    assert done.returncode == 1
    assert "raised ValueError" in done.stderr
    run = tmp_path / "run"
    summary = summary_of(run)
    assert summary["status"] == "failed"
    assert summary["recipe"] == "grpo"
    assert (summary["steps"], summary["planned_steps"]) == (2, 4)
    assert summary["checkpoint"] == "checkpoints/checkpoint-2"
    assert summary["error"]["kind"] == "RewardError"
    assert "raised ValueError: the judge at https://(not shown)@judge/" in summary["error"]["message"]
    report = make_report(run)
    assert report.facts["status"] == "failed"
    assert report.facts["status_line"].startswith("failed after 2 of 4 steps: RewardError: reward")
    assert report.facts["status_line"].endswith("training.resume=true goes on from checkpoints/checkpoint-2")
    assert "raised ValueError: the judge" in report.page
    for secret in ("hunter2", KEY):
        for text in (done.stdout, done.stderr, json.dumps(summary), report.page, json.dumps(report.facts)):
            assert secret not in text

    name = load_config(run / "config.yaml").grpo.reward
    assert isinstance(name, str)
    on = ["train", str(run / "config.yaml"), "training.resume=true"]
    other = f"reward={name.replace('breaks', 'sound')}"
    refused = trimtab(*on, other, cwd=tmp_path)
    assert refused.returncode == 2
    assert "training.resume_changed=reward takes the new one from here on" in refused.stderr
    again = trimtab(*on, other, "training.resume_changed=reward", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    assert "error" not in summary
    assert make_report(run).facts["status"] == "finished"


@pytest.mark.parametrize("recipe", ["sft", "zeroth_order"])
def test_a_number_that_is_not_finite(
    broken_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path, recipe: str
) -> None:
    words = [f"recipe={recipe}", f"model={broken_model}", f"data={tiny_rows}", "data.eval_fraction=0"]
    words += ["device=cpu", "training.max_steps=4", "monitor.progress=none", f"output_dir={tmp_path / 'run'}"]
    if recipe == "zeroth_order":
        rows = tmp_path / "rows.jsonl"
        rows.write_text("\n".join(json.dumps({"text": f"film {n}", "label": n % 2}) for n in range(16)))
        words += [f"data={rows}", "zeroth.template={text} was", 'zeroth.labels={0: " bad", 1: " good"}']
    config = tmp_path / "config.yaml"
    config.write_text("")
    done = trimtab("train", str(config), *words)
    assert done.returncode == 1, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["checkpoint"]) == ("failed", 0, None)
    assert summary["error"]["kind"] in ("NonFiniteError", "NotFinite")
    facts = make_report(tmp_path / "run").facts
    assert facts["status_line"].startswith("failed before its first step: No")
    assert facts["status_line"].endswith("no checkpoint was saved")


def test_a_run_that_never_began_leaves_its_reason_and_room_for_the_next(
    tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path
) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"model: {tiny_model}\ndata: {tmp_path / 'nothing.jsonl'}\ndevice: cpu\noutput_dir: {tmp_path / 'run'}\n"
        "training: {max_steps: 1, batch_size: 8}\nmonitor: {progress: none}\n"
    )
    done = trimtab("train", str(config))
    assert done.returncode == 2
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", None)
    assert "nothing of that name" in summary["error"]["message"]
    report = make_report(tmp_path / "run")
    assert "nothing of that name" in report.page
    assert report.facts["status_line"].startswith("failed before its first step: RequestError: data.source=")
    assert trimtab("train", str(config), f"data={tiny_rows}").returncode == 0
    assert summary_of(tmp_path / "run")["status"] == "finished"
    # A resume that comes to nothing costs neither the summary nor what was kept.
    done = trimtab("train", str(config), "training.resume=true")
    assert done.returncode == 2
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert trimtab("train", str(config)).returncode == 2  # a run that did begin is not replaced


def fail(run: RunFolder, error: BaseException, rank: int = 0, processes: int = 1, *words: str) -> None:
    config = load_config(None, [f"output_dir={run.path}", *words])
    plan = dataclasses.replace(PLAN, processes=processes)
    with pytest.raises(type(error)) as caught, failure_kept(run, config, plan, rank):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "failed"),
        (MemoryError(), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_whatever_ends_it(tmp_path: Path, error: BaseException, status: str) -> None:
    run = RunFolder(tmp_path)
    run.reached(7, 9)
    fail(run, error)
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["steps"]) == (status, 7)
    assert summary["error"] == {"kind": type(error).__name__, "message": str(error)}
    facts = make_report(tmp_path).facts
    assert facts["status"] == status
    assert type(error).__name__ in facts["health"][0]["said"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".trimtab-run.json", "summary.json"]


def test_long_errors_are_cut(tmp_path: Path) -> None:
    fail(RunFolder(tmp_path), ValueError("\n".join(f"line {n}" for n in range(1000))))
    lines = summary_of(tmp_path)["error"]["message"].splitlines()
    assert lines[0] == "line 0"
    assert len(lines) == 30


def test_of_several_processes_the_first_that_fails_writes(tmp_path: Path) -> None:
    zero, one = (RunFolder(tmp_path, opened=time.time() - 1) for _ in range(2))
    fail(one, ValueError("the cause"), 1, 2)
    fail(zero, TrimtabError("rank 1 is gone"), 0, 2)
    summary = summary_of(tmp_path)
    assert (summary["rank"], summary["error"]["message"]) == (1, "the cause")
    assert make_report(tmp_path).facts["health"][0]["said"] == "rank 1: ValueError: the cause"
    later = RunFolder(tmp_path, opened=summary["ended"] + 1)
    fail(later, ValueError("another day"), 0, 2)
    assert summary_of(tmp_path)["error"]["message"] == "another day"


def test_a_failure_after_the_result_was_kept_leaves_the_result(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, opened=time.time() - 1)
    run.write_json("summary.json", {"status": "finished"})
    fail(run, RuntimeError("while the processes part"), 1, 2)
    assert summary_of(tmp_path) == {"status": "finished"}


def test_a_figure_that_is_no_number_leaves_a_summary_that_others_can_read(tmp_path: Path) -> None:
    metrics = {"pearson": {"before": math.nan, "after": 0.5}}  # over a single row it is not defined
    RunFolder(tmp_path).write_json("summary.json", {"status": "finished", "metrics": metrics})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is Python's, not JSON's")

    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert read["metrics"] == {"pearson": {"before": "nan", "after": 0.5}}


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("file", "file/run", "nowhere"):
        with pytest.raises(RequestError, match="output_dir="):
            open_run_folder(load_config(None, [f"output_dir={tmp_path / name}"]))


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    fail(RunFolder(tmp_path / "never"), ValueError("early"), 1, 2)
    assert not (tmp_path / "never").exists()


def test_a_disk_that_is_full_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    error = ValueError("the cause")
    fail(RunFolder(tmp_path), error)
    assert "No space left" in error.__notes__[0]


def test_a_run_that_failed_is_neither_exported_nor_replaced_unasked(tmp_path: Path) -> None:
    config = load_config(None, [f"output_dir={tmp_path / 'run'}"])
    run = open_run_folder(config)
    run.begin(config, PLAN, {})
    adapter = run.claim("adapter")
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    fail(run, ValueError("while keeping it"))
    with pytest.raises(RequestError, match="the run failed"):
        read_for_export(run.path)
    with pytest.raises(RequestError, match="already holds a run"):
        open_run_folder(config)


@pytest.mark.slow
def test_a_failure_on_the_second_rank_is_written(grpo: list[str], tmp_path: Path) -> None:
    # The first rank then waits for the second, and torchrun ends it after half a minute.
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *grpo, "processes=2", "training.batch_size=2"],
        **{"capture_output": True, "text": True, "timeout": 280, "cwd": tmp_path, "check": False},
        env={**os.environ, "BREAKS_ON": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["rank"], summary["steps"]) == ("failed", 1, 2)
    assert "raised ValueError" in summary["error"]["message"]
