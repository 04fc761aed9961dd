"""A model split over virtual GPUs: stock TRL mixes devices there, ours trains and gives the one-device losses."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.config import load_config
from trimtab.placement import PlacementPlan, return_outputs
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

HEAD_ON_LAST = {
    "model.embed_tokens": "cuda:0",
    "model.rotary_emb": "cuda:0",
    "model.layers.0": "cuda:0",
    "model.layers.1": "cuda:1",
    "model.norm": "cuda:1",
    "lm_head": "cuda:1",
}
MIXED = "Expected all tensors to be on the same device"


def token_sum(completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs from one completion to the next, so that there is something to learn."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def words(model: Path, out: Path, recipe: str) -> list[str]:
    common = [
        f"recipe={recipe}",
        f"model={model}",
        f"output_dir={out}",
        "precision=fp32",
        "training.max_steps=2",
        "training.batch_size=4",
        "training.learning_rate=0.01",
        "data.max_length=96",
        "data.eval_fraction=0",
        "monitor.progress=none",
    ]
    if recipe == "sft":
        return [*common, "data.max_rows=16"]
    more = "data=sums data.max_rows=8 reward=test_grpo_split:token_sum num_generations=4"
    return [*common, *more.split(), "max_completion_length=6", "grpo.beta=0.05"]


def train(settings: list[str], plan: PlacementPlan | None = None) -> dict[str, list[float]]:
    config = load_config(None, settings)
    run = open_run_folder(config)
    made = plan or plan_run(config).plan
    run_recipe(config, made, run, lambda _: None)
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["phase"] == "train"]
    return {key: [step[key] for step in steps if key in step] for key in steps[0]}


def stock_trainer(recipe: str, model: Any, tokenizer: Any, folder: Path) -> Any:
    """TRL's own trainer on a model that is already split."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    if recipe == "sft":
        rows = Dataset.from_dict({"text": [f"What is {n} plus {n}?" for n in range(8)]})
        return SFTTrainer(model, SFTConfig(**options), train_dataset=rows, processing_class=tokenizer)
    rows = Dataset.from_dict({"prompt": [f"What is {n} plus {n}?" for n in range(8)]})
    return GRPOTrainer(
        model,
        lambda completions, **_: [float(len(text)) for text in completions],
        GRPOConfig(num_generations=4, max_completion_length=4, **options),
        rows,
        processing_class=tokenizer,
    )


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_stock_trl_mixes_devices_and_the_edge_mends_it(tiny_model: Path, tmp_path: Path, recipe: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, device_map=HEAD_ON_LAST)
    trainer = stock_trainer(recipe, model, tokenizer, tmp_path)
    # With Triton its head's kernel runs on the current GPU, which is not the one that the head is on.
    with pytest.raises((RuntimeError, ValueError), match=f"{MIXED}|Pointer argument"):
        trainer.train()

    model = AutoModelForCausalLM.from_pretrained(tiny_model, device_map=HEAD_ON_LAST)
    trainer = stock_trainer(recipe, model, tokenizer, tmp_path)
    return_outputs(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_our_recipes_train_with_the_head_on_the_last_gpu(
    tiny_model: Path, tmp_path: Path, recipe: str
) -> None:
    """The map on which stock TRL fails, handed to our recipes as a plan."""
    whole = train([*words(tiny_model, tmp_path / "one", recipe), "device=cpu"])
    settings = [*words(tiny_model, tmp_path / "two", recipe), "model_parallel=true"]
    plan = dataclasses.replace(plan_run(load_config(None, settings)).plan, device_map=HEAD_ON_LAST)
    split = train(settings, plan)
    assert split["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert len(split["loss"]) == 2


@pytest.mark.parametrize(
    ("recipe", "counts"),
    [
        ("grpo", [4]),
        ("sft", [2]),
        *(pytest.param(r, [2, 4], marks=pytest.mark.slow) for r in ("grpo", "sft")),
    ],
)
def test_one_device_two_gpus_and_four_give_the_same_losses(
    four_layers: Path, tmp_path: Path, recipe: str, counts: list[int]
) -> None:
    from trimtab import virtual_gpus

    one = train([*words(four_layers, tmp_path / "one", recipe), "device=cpu"])
    for count in counts:
        with virtual_gpus(count):
            settings = [*words(four_layers, tmp_path / f"{count}", recipe), "model_parallel=true"]
            planned = plan_run(load_config(None, settings)).plan
            assert planned.strategy == "split"
            assert len(planned.devices) == count
            several = train(settings, planned)
        assert several["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert min(one["grad_norm"]) > 0
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        if recipe == "grpo":
            assert several["reward"] == pytest.approx(one["reward"], abs=1e-6)
            assert several["kl"] == pytest.approx(one["kl"], abs=1e-5)
        for number in range(count):
            assert all(peak > 0 for peak in several[f"peak_memory_bytes/cuda:{number}"])
            assert all(math.isfinite(now) for now in several[f"memory_bytes/cuda:{number}"])


@pytest.mark.virtual_gpus(2)
def test_full_tuning_puts_the_reference_where_the_policy_lies(four_layers: Path, tmp_path: Path) -> None:
    settings = [*words(four_layers, tmp_path / "run", "grpo"), "model_parallel=true", "method=full"]
    figures = train(settings)
    assert figures["kl"][0] == pytest.approx(0, abs=1e-5)
    assert figures["kl"][1] > 0


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "elsewhere"}, "none"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "torchrun"),
    ],
    ids=["stale variables", "an outer torchrun of one"],
)
def test_a_split_trains_in_spite_of_launcher_variables(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    launcher: str,
) -> None:
    """Accelerate refuses a device map where rank variables are set; those that mean nothing are taken away."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = [*words(tiny_model, tmp_path / "run", "grpo"), "model_parallel=true"]
    plan = plan_run(load_config(None, settings)).plan
    assert (plan.strategy, plan.launcher) == ("split", launcher)
    assert len(train(settings, plan)["loss"]) == 2


@pytest.mark.virtual_gpus(2)
def test_an_unsplit_model_beside_a_second_visible_gpu(tiny_model: Path, tmp_path: Path) -> None:
    """TRL's trainer by itself refuses: it would wrap the model in DataParallel."""
    settings = [*words(tiny_model, tmp_path / "run", "grpo"), "model_parallel=false", "processes=1"]
    figures = train([*settings, "speed.compile=false"])
    assert len(figures["loss"]) == 2
    assert "peak_memory_bytes/cuda:1" not in figures
    assert torch.cuda.max_memory_allocated(1) == 0


def test_the_edge_moves_outputs_and_hides_no_error() -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
            if not input_ids.numel():
                raise ValueError("nothing to read")
            return {"logits": input_ids.to("meta"), "note": "text", "none": None}

    model = Model()
    return_outputs(model)
    with pytest.raises(ValueError, match="nothing to read"):
        model(torch.ones(0))
    out = model(input_ids=torch.ones(2, device="meta"))
    assert (out["logits"].device.type, out["note"], out["none"]) == ("meta", "text", None)
