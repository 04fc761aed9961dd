"""Kills inside writes, the short way: at every file operation of a life without a model, and a few in real runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kill_runs import HERE, Warm, same_run


def test_a_kill_before_any_file_operation_loses_nothing(tmp_path: Path) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path  # a disk takes its time to sync
    place = tempfile.mkdtemp(prefix="trimtab-kills-", dir=memory)
    try:
        _kill_before_every_operation(place)
    finally:
        shutil.rmtree(place)


def _kill_before_every_operation(place: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "checkpoint_life.py"), place],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.mark.parametrize("recipe", ["sft", pytest.param("zeroth_order", marks=pytest.mark.slow)])
def test_a_run_killed_inside_its_writes_ends_as_if_it_had_not_been(
    recipe: str, warm: Warm, courses: dict[str, list[str]], tmp_path: Path
) -> None:
    """Before an operation amid its checkpoints, and torn in the middle of a file of a later one."""
    plain, folder = tmp_path / "plain", tmp_path / "killed"
    words = [
        *courses[recipe],
        "training.max_steps=3",
        "training.eval_steps=1",
        "training.save_steps=1",
        "samples.prompts=[]",
    ]
    whole = warm.train([*words, f"output_dir={plain}"], plain)
    assert whole.code == 0, whole.output[-3000:]
    assert whole.operations is not None
    ended = warm.train([*words, f"output_dir={folder}"], folder, at=whole.operations // 2)
    assert ended.code == -9, ended.output[-3000:]
    resumed = [*words, f"output_dir={folder}", "training.resume=true"]
    assert warm.train(resumed, folder, at=whole.operations // 4, torn=1000).killed
    last = warm.train(resumed, folder)
    assert last.code == 0, last.output[-3000:]
    same_run(folder, plain)
