"""Processes that were told to stop at different times stop at the same step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from types import SimpleNamespace
import torch.distributed as dist
from trimtab.recipes.interrupt import GracefulStop

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
stop, ended = GracefulStop(print), []
args = SimpleNamespace(world_size=2, device="cpu")
for step in range(1, 5):
    stop.stopped = stop.stopped or (rank, step) == (1, 2)
    control = SimpleNamespace(should_training_stop=False)
    stop.on_step_end(args, SimpleNamespace(global_step=step, max_steps=4), control)
    ended.append(control.should_training_stop)
print(ended, flush=True)
dist.barrier()
os._exit(0)
"""


def test_one_process_that_is_told_is_enough(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[0].strip() for rank in ranks]
    # From the step on at which one was told, to the last, after which there is nothing to stop.
    assert said == ["[False, True, True, False]"] * 2
