"""A model that sees, split over two virtual GPUs: the losses of one device, also with its head on the second GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tiny_processors import saved_pair
from trimtab.config import load_config
from trimtab.placement import PlacementPlan
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

SHIRG = ["vision.views=shirg", "shirg.size=56", "shirg.crop=40", "shirg.keep=8"]
DIFFUSION = ["vision.objective=masked_diffusion", "vision.answer_length=4", "vision.mask_token=<pad>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_pair("llava_onevision", tmp_path_factory.mktemp("models") / "llava")


def words(model: Path, out: Path) -> list[str]:
    return [
        *("recipe=vision", f"model={model}", "data=drawn-pictures", "data.max_rows=16", f"output_dir={out}"),
        *("lora.targets=[vision, connector, all-linear]", "training.max_steps=2", "training.batch_size=4"),
        *("training.learning_rate=0.01", "precision=fp32", "data.eval_fraction=0", "data.max_length=512"),
        *("training.gradient_checkpointing=true", "monitor.progress=none"),
    ]


def losses(settings: list[str], plan: PlacementPlan | None = None) -> list[float]:
    config = load_config(None, settings)
    run = open_run_folder(config)
    run_recipe(config, plan or plan_run(config).plan, run, lambda _: None)
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["phase"] == "train"]


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize("more", [[], pytest.param(SHIRG, marks=pytest.mark.slow), DIFFUSION])
def test_a_split_model_has_the_losses_of_one_device(model: Path, tmp_path: Path, more: list[str]) -> None:
    whole = losses([*words(model, tmp_path / "one"), "device=cpu", *more])
    settings = [*words(model, tmp_path / "two"), "model_parallel=true", *more]
    plan = plan_run(load_config(None, settings)).plan
    assert plan.device_map is not None
    assert losses(settings, plan) == pytest.approx(whole, rel=1e-4)
    # What follows the last layer goes where that layer is, as it does where the first GPU has no room for it.
    last = {"model.language_model.norm": "cuda:1", "lm_head": "cuda:1"}
    assert set(last) <= set(plan.device_map)
    apart = dataclasses.replace(plan, device_map=plan.device_map | last)
    third = [*words(model, tmp_path / "three"), "model_parallel=true", *more]
    assert losses(third, apart) == pytest.approx(whole, rel=1e-4)
