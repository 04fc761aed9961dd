"""Processes that were told to stop at different times stop at the same step."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from trimtab.recipes.interrupt import GracefulStop


def ended(rank: int, store: Path, queue: Any) -> None:
    """What one of two ranks does at the end of each of four steps, where the second is told in its second step."""
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    stop, stopped = GracefulStop(print), []
    args = SimpleNamespace(world_size=2, device="cpu")
    for step in range(1, 5):
        stop.stopped = stop.stopped or (rank, step) == (1, 2)
        control = SimpleNamespace(should_training_stop=False)
        stop.on_step_end(args, SimpleNamespace(global_step=step, max_steps=4), control)
        stopped.append(control.should_training_stop)
    queue.put(stopped)
    dist.barrier()
    dist.destroy_process_group()


def test_one_process_that_is_told_is_enough(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    ranks = [fork.Process(target=ended, args=(rank, tmp_path / "store", queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(200)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        # From the step on at which one was told, to the last, after which there is nothing to stop.
        assert [queue.get() for _ in ranks] == [[False, True, True, False]] * 2
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.virtual_gpus(1)
def test_on_gpus_the_answer_of_a_step_is_read_in_the_next(tmp_path: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        stop, ended = GracefulStop(print), []
        args = SimpleNamespace(world_size=2, device="cuda:0")
        for step in range(1, 6):
            stop.stopped = step > 1
            control = SimpleNamespace(should_training_stop=False)
            stop.on_step_end(args, SimpleNamespace(global_step=step, max_steps=5), control)
            ended.append(control.should_training_stop)
        assert ended == [False, False, True, True, False]
    finally:
        dist.destroy_process_group()


def told(queue: Any, stop: GracefulStop, said: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    queue.put((stop.stopped, said))


def test_a_forked_worker_leaves_ctrl_c_to_its_process() -> None:
    """A terminal tells both. The worker neither speaks nor breaks off: the process still wants its batches."""
    said: list[str] = []
    stop = GracefulStop(said.append)
    stop.on_train_begin(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
    try:
        fork = multiprocessing.get_context("fork")
        queue = fork.SimpleQueue()
        worker = fork.Process(target=told, args=(queue, stop, said))
        worker.start()
        assert queue.get() == (False, [])
        worker.join(30)
        assert worker.exitcode == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.stopped
        assert len(said) == 1
    finally:
        stop.restore()
