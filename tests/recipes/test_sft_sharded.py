"""SFT with weights sharded over processes (FSDP2): the losses and norms of the run with whole weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def launch(strategy: str, run: Path, settings: list[str]) -> list[dict[str, float]]:
    """Two processes on the CPU; the figures of their steps."""
    program = Path(__file__).with_name("sft_sharded_run.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(program), strategy, *settings, f"output_dir={run}"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=run.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"]


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
    whole = launch("data_parallel", tmp_path / "whole", settings)
    sharded = launch("sharded", tmp_path / "sharded", settings)
    assert len(whole) == len(sharded) == 3
    for one, other in zip(whole, sharded, strict=True):
        for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert other[key] == pytest.approx(one[key], rel=1e-3), key
