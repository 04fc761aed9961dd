"""SFT with weights sharded over processes (FSDP2): the losses and norms of the run with whole weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from many_processes import start, trained
from safetensors.torch import load_file

from trimtab.config import load_config
from trimtab.file_system import size_of
from trimtab.recipes.disk_needs import planned_room
from trimtab.recipes.planning import plan_run

ADAPTER = "adapter_model.safetensors"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_sharded_is_data_parallel(tiny_model: Path, tiny_rows: Path, tmp_path: Path, method: str) -> None:
    settings = [
        *(
            f"model={tiny_model}",
            f"data={tiny_rows}",
            "device=cpu",
            "monitor.progress=none",
            "data.max_length=96",
        ),
        *("training.max_steps=3", "training.batch_size=4", "training.learning_rate=0.01", f"method={method}"),
        # With an evaluation before the first step, after which FSDP2 has whole parameters in its outermost module.
        *("samples.prompts=[]", "data.eval_fraction=0.1"),
    ]
    for strategy, run in (("data_parallel", tmp_path / "whole"), ("sharded", tmp_path / "sharded")):
        start(2, "sft_sharded_run.py", [strategy, *settings, f"output_dir={run}"], run)
    whole, sharded = trained(tmp_path / "whole"), trained(tmp_path / "sharded")
    assert len(whole) == len(sharded) == 3
    for one, other in zip(whole, sharded, strict=True):
        for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert other[key] == pytest.approx(one[key], rel=1e-3), key
    if method == "lora":
        ends = ("adapter", "checkpoints/checkpoint-3")
        for one, other in (
            [load_file(tmp_path / run / end / ADAPTER) for run in ("whole", "sharded")] for end in ends
        ):
            assert one.keys() == other.keys()
            for name, weight in one.items():
                torch.testing.assert_close(other[name], weight, rtol=0.05, atol=2e-3, msg=name)
    # What is written is what was told beforehand, of the adapter alone where there is one.
    run = tmp_path / "sharded"
    config = load_config(None, [*settings, f"output_dir={tmp_path / 'other'}"])
    planned = plan_run(config)
    plan = dataclasses.replace(planned.plan, strategy="sharded", processes=2)
    room = planned_room(config, dataclasses.replace(planned, plan=plan))
    written = size_of(run / "checkpoints" / "checkpoint-3")
    assert written <= room.checkpoint <= written + 2**20
    assert room.kept >= size_of(run / "adapter") + size_of(run / "model")
