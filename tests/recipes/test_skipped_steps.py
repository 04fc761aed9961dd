"""Steps that fp16's gradient scaler skips, in a whole run: counted in the metrics, the summary and the report."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from trimtab.config import load_config
from trimtab.monitor.metrics import read_metrics
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder
from trimtab.report.run_facts import read_run


@pytest.mark.virtual_gpus(1)
@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_the_summary_tells_how_many_steps_were_skipped(
    optimizer: str, tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer is called for a skipped step as well, and does nothing: that counts all the same."""
    start = functools.partialmethod(torch.amp.GradScaler.__init__, init_scale=2.0**30)
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", start)
    words = [
        *("recipe=sft", f"model={tiny_model}", f"data={tiny_rows}", f"output_dir={tmp_path / 'run'}"),
        *("device=cuda", "precision=fp16", "training.max_steps=2", f"training.optimizer={optimizer}"),
        "speed.compile=false",
        *("monitor.progress=none", "data.eval_fraction=0", "training.save_steps=1", "samples.prompts=[]"),
    ]
    summary = run(words)
    assert summary["skipped_steps"] == 2, "from such a scale no step is made"
    again = run([*words, "training.max_steps=4", "training.resume=true"])
    assert again["skipped_steps"] == 4, "those before the resume count"
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["phase"] == "skip"] == [1, 2, 3, 4]
    assert [line["skipped_steps"] for line in lines if line["phase"] == "train"][-1] == 4
    told = [event.said for event in read_run(tmp_path / "run").events()]
    assert "4 steps skipped: a gradient overflowed in fp16" in told


def run(words: list[str]) -> dict[str, object]:
    config = load_config(None, words)
    folder = open_run_folder(config)
    run_recipe(config, plan_run(config).plan, folder, lambda _: None)
    kept: dict[str, object] = json.loads((folder.path / "summary.json").read_text())
    return kept
