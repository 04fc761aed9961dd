"""The same config on a real GPU: the plan's device and precision are in force, and fp32 agrees with the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.config import load_config
from trimtab.hardware import probe
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="no CUDA device here"),
]


def losses_on(device: str, precision: str, model: Path, rows: Path, folder: Path) -> list[float]:
    settings = [f"model={model}", f"data={rows}", f"device={device}", f"precision={precision}", "processes=1"]
    settings += [
        f"output_dir={folder}",
        "training.max_steps=4",
        "training.batch_size=8",
        "training.learning_rate=0.01",
    ]
    config = load_config(None, [*settings, "monitor.progress=none"])
    plan = plan_run(config).plan
    run_recipe(config, plan, open_run_folder(config), lambda line: None)
    assert json.loads((folder / "plan.json").read_text())["device"] == plan.device
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("phase") == "train" and "loss" in line]


def test_fp32_on_the_gpu_agrees_with_the_cpu(tiny_model: Path, tiny_rows: Path, tmp_path: Path) -> None:
    cpu = losses_on("cpu", "fp32", tiny_model, tiny_rows, tmp_path / "cpu")
    gpu = losses_on("cuda", "fp32", tiny_model, tiny_rows, tmp_path / "gpu")
    assert len(cpu) == 4
    assert gpu == pytest.approx(cpu, abs=2e-3)


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16"])
def test_low_precision_trains_on_the_gpu(
    tiny_model: Path, tiny_rows: Path, tmp_path: Path, precision: str
) -> None:
    cpu = losses_on("cpu", "fp32", tiny_model, tiny_rows, tmp_path / "cpu")
    low = losses_on("cuda", precision, tiny_model, tiny_rows, tmp_path / "low")
    assert low == pytest.approx(cpu, abs=0.1)
    assert low[-1] < low[0]
