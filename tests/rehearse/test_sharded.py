"""Sharded training on two virtual GPUs computes, bit for bit, what it computes in two processes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "sharded_training.py"


def found(*command: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    made: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return made


def test_fsdp_and_tensor_parallelism_are_the_cpus() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    on_cpu = found(*launcher, str(PROGRAM), "cpu")
    virtual = found("-m", "trimtab", "rehearse", "--gpus", "2", "--ranks", "2", str(PROGRAM))
    assert set(on_cpu) >= {"plain", "mixed precision", "accumulated", "on a grid", "offloaded", "from meta"}
    assert virtual == on_cpu
    assert virtual["plain"] != virtual["mixed precision"]
