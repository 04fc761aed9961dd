"""Sharded training on two virtual GPUs computes, bit for bit, what it computes in two processes on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "sharded_training.py"


def found(said: str) -> dict[str, Any]:
    (line,) = [line for line in said.splitlines() if line.startswith("FOUND ")]
    made: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return made


def in_two_processes(*command: str) -> str:
    """What two ranks print, started as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = "".join(rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


def test_fsdp_and_tensor_parallelism_are_the_cpus(rehearse_warm: Callable[..., dict[str, Any]]) -> None:
    on_cpu = found(in_two_processes(str(PROGRAM), "cpu"))
    report = rehearse_warm(str(PROGRAM), ranks=2)
    assert report["exit"] == 0, report["text"]
    virtual = found(report["stdout"])
    assert set(on_cpu) >= {"plain", "mixed precision", "accumulated", "on a grid", "offloaded", "from meta"}
    assert virtual == on_cpu
    assert virtual["plain"] != virtual["mixed precision"]
