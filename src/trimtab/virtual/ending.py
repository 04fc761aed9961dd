"""The end of a process that took part in collectives: no thread of gloo may let go of a tensor when Python is gone.

Letting go of a tensor that Python has seen needs Python's lock; a thread that asks for it after Python's end is stopped
in the middle of C++, and the process aborts. So at its end a process waits until its other threads sleep, and keeps for
good what an unfinished collective still holds. It never waits for another rank.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

_pending: list[tuple[Any, Any]] = []
"""Collectives that may be under way, each with its tensors."""


def watch(work: Any, tensors: Any) -> None:
    """Hold the tensors of a collective until it is done. `work` is its handle as C++ gives it out: the one that Python
    has keeps the results (futures.py), and would keep them here beyond their time."""
    _pending[:] = [entry for entry in _pending if not dist.Work.unbox(entry[0]).is_completed()]
    _pending.append((work, tensors))


@cache
def settle_at_exit() -> None:
    """Let this process, and those forked from it, settle before Python takes itself down."""
    atexit.register(settle)
    # A child has none of the threads that would finish them, and their destructors would wait for these.
    os.register_at_fork(after_in_child=_keep)


def settle(most: float = 5.0) -> None:
    """Wait until every other thread sleeps, and keep what is still in use by a collective."""
    calm, until = 0, time.monotonic() + most
    while calm < 3 and time.monotonic() < until:
        time.sleep(0.01)  # gives them the lock
        calm = calm + 1 if _others_sleep() else 0
    _keep()


def _keep() -> None:
    for entry in _pending:
        # One reference more than anybody will ever drop.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(entry))
    _pending.clear()


def _others_sleep() -> bool:
    """Whether every other thread of this process waits; true where there is no /proc to tell."""
    mine = str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("[0-9]*/stat"):
        try:
            state = path.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended
        if state in "RDT" and path.parent.name != mine:
            return False
    return True
