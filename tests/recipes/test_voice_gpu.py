"""The voice recipe on a real GPU: the CPU's losses in fp32, the same in bf16 and fp16, and a clip that is spoken."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path
from typing import Any

import pytest

from trimtab.hardware import probe

pytest.importorskip("soundfile", reason="clips are read by soundfile (trimtab[voice])")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe().gpus, reason="no CUDA device here")]
LORA = ("method=lora", "lora.r=8", "lora.targets=[attention, text_mlp, audio_mlp, audio_head]")
LORA = (*LORA, "training.gradient_accumulation_steps=4", "training.max_grad_norm=0.5")
FULL = ("method=full",)


def train(folder: Path, steps: int, *more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from trimtab.config import load_config
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run import run_recipe
    from trimtab.recipes.run_folder import open_run_folder

    words = [
        *("recipe=voice", f"output_dir={folder}", f"training.max_steps={steps}", "training.batch_size=4"),
        *("training.learning_rate=0.0005", "training.logging_steps=1", "training.keep_best=false"),
        *("monitor.progress=none", "voice.show=2", "voice.max_seconds=6", "voice.temperature=0"),
    ]
    config = load_config(None, [*words, *more])
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return summary, [line for line in lines if line["phase"] == "train"]


@pytest.mark.parametrize("method", [LORA, FULL], ids=["lora", "full"])
def test_the_gpu_learns_what_the_cpu_learns(tmp_path: Path, method: tuple[str, ...]) -> None:
    _, there = train(tmp_path / "gpu", 6, "device=cuda", "precision=fp32", *method)
    _, here = train(tmp_path / "cpu", 6, "device=cpu", *method)
    assert [row["loss"] for row in there] == pytest.approx([row["loss"] for row in here], rel=5e-3)


@pytest.mark.parametrize("method", [LORA, FULL], ids=["lora", "full"])
def test_half_precision_follows_fp32_for_fifty_steps(tmp_path: Path, method: tuple[str, ...]) -> None:
    _, wide = train(tmp_path / "fp32", 50, "device=cuda", "precision=fp32", *method)
    for precision in ("bf16", "fp16"):
        summary, rows = train(tmp_path / precision, 50, "device=cuda", f"precision={precision}", *method)
        assert summary["precision"] == precision
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in wide], rel=0.02)
        assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in rows)


def test_it_speaks_on_the_gpu(tmp_path: Path) -> None:
    summary, _ = train(tmp_path / "run", 20, "device=cuda", "precision=bf16", *FULL)
    for sample in summary["samples"]:
        with wave.open(str(tmp_path / "run" / sample["clips"]["after"])) as clip:
            assert clip.getframerate() == 24000
            assert clip.getnframes() > 0
