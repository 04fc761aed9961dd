"""DoRA and rsLoRA through a whole run: trained, kept as PEFT keeps them, merged without a difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def test_both_are_trained_kept_and_merged(
    trimtab: Any, tiny_model: Path, tiny_rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = trimtab(
        "train",
        *(f"model={tiny_model}", f"data={tiny_rows}", f"output_dir={run}", "device=cpu"),
        *("training.max_steps=3", "data.eval_fraction=0", "monitor.progress=none"),
        *("lora.dora=true", "lora.rslora=true", "lora.r=4", "training.learning_rate=0.01"),
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads((run / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (kept["use_dora"], kept["use_rslora"]) == (True, True)
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    assert plan["speed"]["adapters"] == "plain"
    assert "DoRA" in plan["reasons"]["speed.adapters"]

    made = trimtab("export", str(run), "--to", "merged")
    assert made.returncode == 0, made.stderr
    ids = torch.arange(40)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        plain = base(ids).logits
        tuned = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "export" / "merged")(ids).logits
    torch.testing.assert_close(merged, tuned, rtol=1e-4, atol=1e-5)
    assert (tuned - plain).abs().max() > 1e-4

    alone = trimtab("export", str(run), "--to", "gguf", "--adapter-only")
    assert alone.returncode == 2
    assert "use_dora" in alone.stderr
