"""Sharded training on two virtual GPUs computes, bit for bit, what it computes in two processes on the CPU."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import run_ranks

PROGRAM = Path(__file__).parent / "programs" / "sharded_training.py"


def found(said: str) -> dict[str, Any]:
    (line,) = [line for line in said.splitlines() if line.startswith("FOUND ")]
    made: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return made


def on_the_cpu(rank: int, port: int, out: Path) -> None:
    """One of two ranks, as a launcher would start it; what it prints goes into a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [str(PROGRAM), "cpu"]
    with out.open("a") as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path(str(PROGRAM), run_name="__main__")


def test_fsdp_and_tensor_parallelism_are_the_cpus(
    rehearse_warm: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(on_the_cpu, port, tmp_path / "said")
    on_cpu = found((tmp_path / "said").read_text())
    report = rehearse_warm(str(PROGRAM), ranks=2)
    assert report["exit"] == 0, report["text"]
    virtual = found(report["stdout"])
    assert set(on_cpu) >= {"plain", "mixed precision", "accumulated", "on a grid", "offloaded", "from meta"}
    assert virtual == on_cpu
    assert virtual["plain"] != virtual["mixed precision"]
