"""GRPO on a real GPU: TRL's fused head and generation on the plan's device, in each precision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.hardware import probe
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="no CUDA device here"),
]


def token_sum(completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs from one completion to the next: without a spread there is no gradient to look at."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def run(model: Path, folder: Path, *more: str) -> list[dict[str, Any]]:
    rows = folder.parent / "sums.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in range(8)))
    settings = [
        "recipe=grpo",
        f"model={model}",
        f"data={rows}",
        "reward=test_grpo_gpu:token_sum",
        "grpo.chat=false",
        "grpo.num_generations=4",
        "grpo.max_completion_length=8",
        "training.max_steps=3",
        "training.learning_rate=0.001",
        "device=cuda",
        "processes=1",
        f"output_dir={folder}",
        "monitor.progress=none",
    ]
    config = load_config(None, [*settings, *more])
    plan = plan_run(config).plan
    run_recipe(config, plan, open_run_folder(config), lambda line: None)
    assert json.loads((folder / "plan.json").read_text())["device"].startswith("cuda")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_it_trains(tiny_model: Path, tmp_path: Path, precision: str, beta: float) -> None:
    lines = run(tiny_model, tmp_path / "run", f"precision={precision}", f"grpo.beta={beta}")
    steps = [line for line in lines if line["phase"] == "train"]
    assert len(steps) == 3
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps if isinstance(step["grad_norm"], float))
    assert any(isinstance(step["grad_norm"], float) for step in steps)


def test_the_same_seed_gives_the_same_rewards(tiny_model: Path, tmp_path: Path) -> None:
    seeds = {"one": 0, "two": 0, "other": 1}
    one, two, other = (
        [line["reward"] for line in lines if "reward" in line]
        for lines in (
            run(tiny_model, tmp_path / name, "precision=fp32", f"seed={seed}") for name, seed in seeds.items()
        )
    )
    assert len(one) == 3
    assert one == two != other
