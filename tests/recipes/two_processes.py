"""Starts a program of tests/recipes in two processes on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def launch(program: str, strategy: str, run: Path, settings: list[str]) -> list[dict[str, float]]:
    """The figures of the steps that it trained."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(Path(__file__).with_name(program)), strategy, *settings, f"output_dir={run}"],
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
