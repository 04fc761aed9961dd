"""The SFT recipe end to end on a tiny model: what is kept, and the classes of runs that must agree."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trimtab.config import load_config
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder


@pytest.fixture(scope="module")
def common(tiny_model: Path, tiny_rows: Path) -> list[str]:
    return [
        f"model={tiny_model}",
        f"data={tiny_rows}",
        "device=cpu",
        "training.max_steps=4",
        "training.batch_size=8",
        "training.learning_rate=0.01",
        "monitor.progress=none",
    ]


@pytest.fixture
def settings(common: list[str], tmp_path: Path) -> list[str]:
    return [*common, f"output_dir={tmp_path / 'run'}"]


@pytest.fixture(scope="module")
def plain(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that others are held against; to be looked at, not written to."""
    _, run = train(
        common, f"output_dir={tmp_path_factory.mktemp('plain') / 'run'}", "training.keep_best=false"
    )
    return run


def train(settings: list[str], *more: str) -> tuple[dict[str, Any], Path]:
    config = load_config(None, [*settings, *more])
    assert config.output_dir is not None
    said: list[str] = []
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), said.append)
    return summary, Path(config.output_dir)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line and line.get("phase") == "train"]


def test_a_run_keeps_what_it_promises_and_gets_better(settings: list[str]) -> None:
    summary, run = train(
        settings, "training.epochs=3", "training.max_steps=null", 'samples.prompts=["What is 1 plus 1?"]'
    )
    assert summary["status"] == "finished"
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"]
    assert summary["samples"][0]["prompt"] == "What is 1 plus 1?"
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "adapter" / "tokenizer.json").is_file()
    assert not list((run / "adapter").glob("*.bin"))
    card = (run / "adapter" / "README.md").read_text()
    assert f"{summary['eval_loss']['after']:.4f}" in card
    plan = json.loads((run / "plan.json").read_text())
    assert plan["device"] == "cpu"
    assert plan["reasons"]["device"] == "asked for"
    kept = load_config(run / "config.yaml", [])
    assert kept.training.epochs == 3.0
    assert all(math.isfinite(x) for x in losses(run))


def test_the_kept_loss_is_the_loss_of_the_kept_weights(settings: list[str], tmp_path: Path) -> None:
    """keep_best reloads the best checkpoint: the figure in the summary is measured on the adapter that is kept."""
    summary, run = train(
        settings, "training.eval_steps=1", "training.learning_rate=0.3", "training.lr_scheduler=constant"
    )
    evals = [json.loads(x).get("eval_loss") for x in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [e for e in evals if e is not None]
    assert summary["eval_loss"]["after"] == pytest.approx(min(seen[1:]), abs=1e-6)


def test_the_same_seed_gives_the_same_bits(settings: list[str], tmp_path: Path) -> None:
    first, run_a = train(settings, f"output_dir={tmp_path / 'a'}", "lora.dropout=0.1")
    second, run_b = train(settings, f"output_dir={tmp_path / 'b'}", "lora.dropout=0.1")
    assert losses(run_a) == losses(run_b)
    assert len(losses(run_a)) == 4
    assert first["eval_loss"] == second["eval_loss"]
    assert weights_equal(run_a, run_b)
    _, run_c = train(settings, f"output_dir={tmp_path / 'c'}", "seed=1")
    assert losses(run_a) != losses(run_c)


def weights_equal(a: Path, b: Path) -> bool:
    left, right = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_accumulation_equals_one_large_batch(settings: list[str], plain: Path) -> None:
    _, parts = train(settings, "training.batch_size=4", "training.gradient_accumulation_steps=2")
    assert len(losses(plain)) == 4
    assert losses(parts) == pytest.approx(losses(plain), abs=1e-5)


def test_checkpointing_changes_nothing_but_memory(settings: list[str], plain: Path) -> None:
    _, saving = train(settings, "training.gradient_checkpointing=true")
    assert losses(saving) == pytest.approx(losses(plain), abs=1e-6)


def test_packed_rows_do_not_see_each_other(settings: list[str], tmp_path: Path) -> None:
    """One packed batch of all rows has the loss of the same rows one by one."""
    common = ["data.eval_fraction=0", "training.max_steps=1", "data.max_rows=12", "data.max_length=512"]
    _, rows = train(settings, *common, f"output_dir={tmp_path / 'rows'}", "training.batch_size=12")
    _, packed = train(settings, *common, f"output_dir={tmp_path / 'packed'}", "data.packing=true")
    assert losses(packed)[0] == pytest.approx(losses(rows)[0], abs=1e-4)


def test_full_tuning_keeps_a_whole_model(settings: list[str]) -> None:
    _, run = train(settings, "method=full", "training.learning_rate=0.001")
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "model" / "tokenizer.json").is_file()
    assert not (run / "adapter").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(settings: list[str], plain: Path) -> None:
    """Stopped by SIGINT after step 2 and resumed, the run ends with the same weights."""
    broken = [*settings, "training.keep_best=false"]

    from trimtab.recipes import trainer_driver

    class Interrupt(trainer_driver.GracefulStop):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)
            super().on_step_end(args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_driver, "GracefulStop", Interrupt)
        summary, _ = train(broken)
    assert summary["status"] == "interrupted"
    assert summary["steps"] == 2
    resumed, run = train(broken, "training.resume=true")
    assert resumed["status"] == "finished"
    assert weights_equal(plain, run)
    assert losses(run) == losses(plain)


def test_held_out_rows_are_answered_before_and_after(settings: list[str]) -> None:
    """Of a random model none is right; the figure stands in the summary and on the card beside the loss."""
    summary, run = train(settings, "samples.held_out=3")
    name = "exact match on 3 held-out rows"
    assert summary["metrics"][name]["before"] == 0.0
    assert 0.0 <= summary["metrics"][name]["after"] <= 1.0
    assert name in (run / "adapter" / "README.md").read_text()
    look = {"answers": [], "right": 0, "of": 3, "scored": "exact match"}
    assert json.loads((run / "baseline.json").read_text())["look"] == look


def test_a_whole_run_that_is_resumed_trains_no_step_more(settings: list[str], plain: Path) -> None:
    """Killed after its last checkpoint, before anything was kept: resumed, it keeps those very weights."""
    ours = [*settings, "training.keep_best=false"]
    _, run = train(ours)
    shutil.rmtree(run / "adapter")
    summary, run = train(ours, "training.resume=true")
    assert (summary["status"], summary["steps"], summary["planned_steps"]) == ("finished", 4, 4)
    assert losses(run) == losses(plain)
    assert weights_equal(plain, run)


def test_what_was_trained_is_kept_before_samples_are_answered(settings: list[str]) -> None:
    """Told to end while it answers, the run has lost nothing but the answers."""
    from trimtab.models import sample

    asked: list[int] = []

    def answer(*args: Any) -> list[str]:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return ["before"]

    ours = [*settings, 'samples.prompts=["What is 1 plus 1?"]']
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "answer", answer)
        with pytest.raises(KeyboardInterrupt):
            train(ours)
    run = Path(load_config(None, ours).output_dir or "")
    assert load_file(run / "adapter" / "adapter_model.safetensors")
    assert "held-out loss" in (run / "adapter" / "README.md").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval_loss"]["after"] is not None
    assert summary["samples"] == []


def test_nan_stops_the_run_loudly(settings: list[str], tiny_model: Path, tmp_path: Path) -> None:
    from trimtab.monitor.health import NonFiniteError

    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    from safetensors.torch import save_file

    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError):
        train(settings, f"model={broken}", "data.eval_fraction=0")


def run_cli(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        check=False,
    )


@pytest.mark.slow
def test_two_ranks_equal_one(settings: list[str], plain: Path, tmp_path: Path) -> None:
    """processes=2 starts torchrun by itself; with the same global batch the losses are those of one process."""
    (tmp_path / "plain.yaml").write_text("recipe: sft\n")
    done = run_cli(
        "train",
        str(tmp_path / "plain.yaml"),
        *settings,
        f"output_dir={tmp_path / 'two'}",
        "processes=2",
        "training.batch_size=4",
        "training.keep_best=false",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    assert (plan["strategy"], plan["processes"], plan["launcher"]) == ("data_parallel", 2, "torchrun")
    assert losses(tmp_path / "two") == pytest.approx(losses(plain), abs=1e-4)


def test_a_second_run_in_the_same_folder_is_refused(settings: list[str]) -> None:
    from trimtab.errors import RequestError

    train(settings, "training.max_steps=1")
    with pytest.raises(RequestError, match="already holds a run") as refused:
        train(settings, "training.max_steps=1")
    assert "overwrite=true" in str(refused.value)
    assert "training.resume=true" in str(refused.value)
    train(settings, "training.max_steps=1", "overwrite=true")
