"""A whole run with compiled layers, by the real compiler: told, kept in the summary, and resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.slow
def test_a_compiled_run_says_so_and_resumes_exactly(
    trimtab: Any, tiny_model: Path, tiny_rows: Path, tmp_path: Path
) -> None:
    def train(name: str, *more: str) -> tuple[Path, str]:
        words = [f"model={tiny_model}", f"data={tiny_rows}", f"output_dir={tmp_path / name}", "device=cpu"]
        words += [
            "training.max_steps=4",
            "training.save_steps=2",
            "training.eval_steps=2",
            "lora.dropout=0.1",
        ]
        words += ["training.keep_best=false", "monitor.progress=plain", "speed.compile=true"]
        done = trimtab("train", *words, *more)
        assert done.returncode == 0, done.stderr
        return tmp_path / name, done.stdout + done.stderr

    whole, said = train("whole")
    assert "layers to be compiled in the first step" in said
    assert "compiled 2 layers as" in said
    summary = json.loads((whole / "summary.json").read_text(encoding="utf-8"))
    assert summary["speed"]["compiled"]["layers"] == 2
    assert summary["speed"]["compiled"]["graphs"] >= 1
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    noted = [line for line in lines if line["phase"] == "compiled"]
    assert noted[0]["layers"] == 2
    assert noted[-1]["graphs"] == summary["speed"]["compiled"]["graphs"]
    assert 0 < noted[0]["seconds"] <= summary["speed"]["compiled"]["seconds"]
    assert "adapted modules" in said, "step 0 proves the gradients of a compiled run too"

    resumed, _ = train("resumed", f"training.resume={whole / 'checkpoints' / 'checkpoint-2'}")
    file = Path("adapter") / "adapter_model.safetensors"
    ours, theirs = load_file(resumed / file), load_file(whole / file)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0, msg=name)
