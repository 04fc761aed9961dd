"""The vision recipe on a real GPU: the CPU's losses in fp32, falling ones in bf16 and fp16, with two views as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.hardware import probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe().gpus, reason="no CUDA device here")]


def train(folder: Path, *more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from trimtab.config import load_config
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run import run_recipe
    from trimtab.recipes.run_folder import open_run_folder

    words = [
        *("recipe=vision", "method=full", f"output_dir={folder}", "training.max_steps=6"),
        *("training.batch_size=8", "training.learning_rate=0.001", "data.max_rows=64", "samples.held_out=4"),
        *("monitor.progress=none", "training.keep_best=false", "training.gradient_checkpointing=true"),
    ]
    config = load_config(None, [*words, *more])
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return summary, [line for line in lines if line["phase"] == "train"]


@pytest.mark.parametrize("more", [(), ("vision.objective=masked_diffusion", "vision.answer_length=4")])
def test_the_gpu_learns_what_the_cpu_learns(tmp_path: Path, more: tuple[str, ...]) -> None:
    _, there = train(tmp_path / "gpu", "device=cuda", "precision=fp32", *more)
    _, here = train(tmp_path / "cpu", "device=cpu", *more)
    assert [row["loss"] for row in there] == pytest.approx([row["loss"] for row in here], rel=5e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("views", ["model", "shirg"])
def test_half_precision_learns_on_the_gpu(tmp_path: Path, precision: str, views: str) -> None:
    small = ("shirg.size=128", "shirg.crop=64", "shirg.keep=8") if views == "shirg" else ()
    summary, rows = train(
        tmp_path / "run", "device=cuda", f"precision={precision}", f"vision.views={views}", *small
    )
    assert summary["status"] == "finished"
    assert summary["precision"] == precision
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["grad_norm"] > 0 for row in rows[1:])
