"""A checkpoint of a fully tuned model that sees is read into it, whatever names transformers saved it by."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def test_a_fully_tuned_model_that_sees_goes_on_from_its_own_weights(trimtab: Trimtab, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        *(
            "recipe=vision",
            "model=tiny-vision",
            "method=full",
            "data.source=drawn-pictures",
            "data.max_rows=8",
        ),
        *("data.max_length=64", "data.eval_fraction=0", "training.batch_size=4", "training.max_steps=3"),
        *("training.save_steps=1", "training.keep_best=false", "samples.held_out=0", "monitor.progress=none"),
        *("device=cpu", "training.save_total_limit=null", f"output_dir={run}"),
    ]
    done = trimtab("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "checkpoint-3")
    done = trimtab("train", str(run / "config.yaml"), "training.resume=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())

    # Of an earlier version, which sealed nothing: a tensor is missing, and another has no place.
    older = run / "checkpoints" / "checkpoint-2"
    shutil.rmtree(run / "checkpoints" / "checkpoint-3")
    (older / "trimtab-manifest.json").unlink()
    saved = load_file(older / "model.safetensors")
    saved["of.another.model"] = saved.pop(sorted(saved)[0])
    save_file(saved, older / "model.safetensors", metadata={"format": "pt"})
    done = trimtab("train", str(run / "config.yaml"), f"training.resume={older}", cwd=tmp_path)
    assert done.returncode == 2
    assert "its weights do not fill the model" in done.stderr
