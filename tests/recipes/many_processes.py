"""Starts programs of this folder in one or several processes on the CPU, and lets those shard weights there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def start(processes: int, program: str, words: Sequence[object], beside: Path) -> None:
    """By torchrun where there are several. It has to end well, in the folder of `beside`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [str(Path(__file__).with_name(program)), *map(str, words)]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), *command],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=beside.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]


def trained(run: Path) -> list[dict[str, float]]:
    """The figures of the steps of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"]


class CPUsAsGPUs:
    """Before a trainer's class: FSDP2 shards on the CPU as well; Accelerate only takes it up where it believes in
    several GPUs."""

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        assert self.accelerator.distributed_type == DistributedType.FSDP
