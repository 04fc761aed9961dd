"""examples/vision.yaml: a model that starts from noise learns drawn pictures, by the next word and by unmasking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision.yaml"
OBJECTIVES = {"causal": 0.8, "masked_diffusion": 0.7}
"""With the share of held-out pictures that must be answered rightly at the end."""


def train(tmp_path: Path, *more: str) -> tuple[dict[str, Any], Path]:
    config = load_config(EXAMPLE, [f"output_dir={tmp_path / 'run'}", "monitor.progress=none", *more])
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    assert summary["status"] == "finished"
    return summary, tmp_path / "run"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_falls_from_the_first_steps(objective: str, tmp_path: Path) -> None:
    summary, run = train(
        tmp_path,
        f"vision.objective={objective}",
        *("training.max_steps=12", "training.batch_size=16", "data.max_rows=200", "training.logging_steps=1"),
        *("samples.held_out=20", "samples.max_new_tokens=3", "training.eval_steps=12"),
    )
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["phase"] == "train"]
    assert sum(losses[-3:]) < sum(losses[:3]) / 2
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"] / 2
    assert list((run / "pictures").iterdir())
    card = (run / "model" / "README.md").read_text()
    assert "random numbers from a seed" in card
    assert "base_model:" not in card, "the hub knows no such model"


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_example_answers_about_pictures_that_it_never_saw(objective: str, tmp_path: Path) -> None:
    summary, _ = train(tmp_path, f"vision.objective={objective}")
    right = summary["metrics"]["accuracy (exact) on 300 held-out rows"]
    assert right["before"] <= 0.25
    assert right["after"] >= OBJECTIVES[objective]
