"""The voice recipe with its own clips, codec and collator: one run, whether on the CPU, split, or of two processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import load_config
from trimtab.placement import PlacementPlan
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PARTS = ["loss", "text_loss", "audio_loss", "audio_loss_0", "audio_loss_7"]


def words(out: Path, *more: str) -> list[str]:
    return [
        *("recipe=voice", f"output_dir={out}", "data.max_rows=8", "training.max_steps=3", "voice.show=0"),
        *("method=lora", "lora.targets=[attention, text_mlp, audio_mlp, audio_head]", "lora.r=4"),
        *("training.learning_rate=0.001", "training.logging_steps=1", "monitor.progress=none"),
        *("training.gradient_accumulation_steps=1", "training.gradient_checkpointing=true", *more),
    ]


def told(run: Path) -> dict[str, list[float]]:
    """What was logged of each part, in training and of what is held out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [*PARTS, *(f"eval_{name}" for name in PARTS)]
    return {name: [line[name] for line in lines if name in line] for name in names}


def train(out: Path, *more: str, plan: PlacementPlan | None = None) -> dict[str, list[float]]:
    config = load_config(None, words(out, *more))
    run_recipe(config, plan or plan_run(config).plan, open_run_folder(config), lambda _: None)
    return told(out)


def agree(found: dict[str, list[float]], wanted: dict[str, list[float]], near: float) -> None:
    for name, values in wanted.items():
        assert len(values) >= (2 if name.startswith("eval_") else 3), name
        assert found[name] == pytest.approx(values, rel=near), name


@pytest.mark.virtual_gpus(2)
def test_a_split_model_makes_the_run_of_the_cpu(tmp_path: Path) -> None:
    here = train(tmp_path / "cpu", "device=cpu")
    wide = ["model_parallel=true", "precision=fp32"]
    plan = plan_run(load_config(None, words(tmp_path / "none", *wide))).plan
    assert plan.device_map is not None
    agree(train(tmp_path / "split", *wide, plan=plan), here, 1e-3)
    # Where the first GPU has no room for them, norm and heads go behind the last layer.
    last = dict.fromkeys(["model.norm", "text_lm_head", "audio_lm_head"], "cuda:1")
    assert set(last) <= set(plan.device_map)
    apart = dataclasses.replace(plan, device_map=plan.device_map | last)
    agree(train(tmp_path / "apart", *wide, plan=apart), here, 1e-3)


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_split_in_half_precision_it_stays_near(tmp_path: Path, precision: str) -> None:
    here = train(tmp_path / "cpu", "device=cpu")
    agree(train(tmp_path / precision, "model_parallel=true", f"precision={precision}"), here, 0.02)


def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    one = train(tmp_path / "one", "device=cpu", "training.batch_size=2")
    settings = words(tmp_path / "two", "device=cpu", "processes=2", "training.batch_size=1")
    (tmp_path / "voice.yaml").write_text("recipe: voice\n")
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", "voice.yaml", *settings],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    agree(told(tmp_path / "two"), one, 1e-3)
