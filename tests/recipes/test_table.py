"""The table of recipes: what each declares, and that a new one is its own file and a line: nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from trimtab.config import load_config
from trimtab.config.keys import RECIPE_SECTIONS
from trimtab.config.schema import Config
from trimtab.placement import Workload
from trimtab.recipes.loop_driver import LoopDriver
from trimtab.recipes.planning import plan_run
from trimtab.recipes.recipe import Job, Need, Recipe
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder
from trimtab.recipes.sft import SFT
from trimtab.recipes.table import RECIPES


def test_the_table_the_settings_and_the_examples_name_the_same_recipes(repository: Path) -> None:
    assert set(RECIPES) == set(get_args(Config.model_fields["recipe"].annotation))
    sections = {section.recipe: section for section in RECIPE_SECTIONS.values()}
    assert {name: recipe.settings for name, recipe in RECIPES.items() if recipe.settings} == sections
    examples = {load_config(file, []).recipe for file in (repository / "examples").glob("*.yaml")}
    assert examples == set(RECIPES)


def test_reading_the_table_imports_neither_torch_nor_a_trainer() -> None:
    """Planning, cards and reports read it; what runs is imported when it runs."""
    code = "import sys, trimtab.recipes.table; print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Descent:
    """Plain gradient descent on the mean loss of the rows: as small as an engine can be."""

    total, steps_per_epoch, evaluates, skipped = 3, 3, False, 0

    def __init__(self, job: Job) -> None:
        self._job, self._step = job, 0

    def open(self, *, main: bool) -> None:
        return None

    def step(self) -> tuple[int, int, dict[str, float], tuple[str, ...]]:
        model, row = self._job.model, self._job.prepared.train[0]
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.grad is not None):
                parameter -= self._job.config.training.learning_rate * parameter.grad
                parameter.grad = None
        self._step += 1
        return self._step, self._step, {"loss": loss.item(), "learning_rate": 0.1}, ()

    def measure(self, heard: Any) -> dict[str, float]:
        raise AssertionError("nothing is held out")

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    def beside(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], taken: int) -> None:
        self._step = state["step"]


def test_a_new_recipe_is_a_description_and_nothing_else(
    tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that nobody has heard of is planned, run, kept and described by its line in the table alone."""
    descent = Recipe(
        name="sft",  # in the place of another, for the name must be one that the settings know
        words=lambda config: "plain descent",
        workload=lambda config, on_cpu: Workload(batch_size=1),
        need=lambda config: Need({}, "nothing much", ["wait"]),
        prepare=SFT.prepare,
        build=lambda job: LoopDriver(job, Descent(job)),
        outcome=lambda job, driver: {"metrics": {"answer": {"before": 0.0, "after": 42.0}}},
        look=None,
    )
    monkeypatch.setitem(RECIPES, "sft", descent)
    words = [f"model={tiny_model}", f"data={tiny_rows}", "device=cpu", "training.learning_rate=0.1"]
    config = load_config(None, [*words, "monitor.progress=none", f"output_dir={tmp_path / 'run'}"])
    run = open_run_folder(config)
    summary = run_recipe(config, plan_run(config).plan, run, lambda line: None)
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    card = (run.kept_folder(config) / "README.md").read_text()
    assert "LoRA adapter by plain descent" in card
    assert "| answer | 0.0000 before, 42.0000 after |" in card
    assert run.newest_checkpoint() == run.checkpoints / "checkpoint-3"
