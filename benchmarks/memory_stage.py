"""The model folder, the rows and the config of a run of `memory_peaks.py`. Measures nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory_cases import Run
from sft_stage import full_rows, make_tokenizer, write_rows

STEPS = 4


def stage(folder: Path, run: Run, *, weights: bool) -> Path:
    """Write all that `trimtab train` reads, and say where its config is; without `weights` the model is its config."""
    from transformers import AutoConfig

    model = folder / "model"
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[run.family]
    config = AutoConfig.for_model(run.family, **run.config, architectures=[architecture], dtype="bfloat16")
    config.save_pretrained(model)
    make_tokenizer(run.config["vocab_size"], None).save_pretrained(model)
    if weights:
        # In a process of its own: this one never touches the GPU, whose memory is what is measured.
        subprocess.run([sys.executable, __file__, str(model)], check=True)
    rows = folder / "rows.jsonl"
    if run.mixed:
        draw = random.Random(0)
        texts = (text.split() for text in full_rows(STEPS * run.batch, run.length))
        cut = [" ".join(words[: draw.randint(20, len(words))]) for words in texts]
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in cut), encoding="utf-8")
    else:
        write_rows(rows, STEPS * run.batch, run.length)
    settings: dict[str, Any] = {
        "recipe": "sft",
        "model": {"name": str(model)},
        "data": {"source": str(rows), "format": "text", "train_on": "all", "max_length": run.length},
        "method": "lora",
        "lora": {"r": 16, "targets": "all-linear"},
        "training": {"max_steps": STEPS, "batch_size": run.batch, "save_steps": 100000, "keep_best": False},
        "device": "cuda",
        "precision": "bf16",
        "monitor": {"progress": "none"},
        "output_dir": str(folder / "run"),
    }
    for key, value in run.settings.items():
        whole = isinstance(value, dict) and key != "data"
        settings[key] = {**settings.get(key, {}), **value} if whole else value
    if settings["recipe"] == "zeroth_order":
        settings["data"]["max_length"] = run.length
        del settings["lora"]
    else:
        settings["data"]["eval_fraction"] = 0.0
    file = folder / "config.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


def save_weights(model: Path) -> None:
    """Random weights for a folder that has a config, made on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    made.save_pretrained(model, max_shard_size="4GB")


if __name__ == "__main__":
    save_weights(Path(sys.argv[1]))
