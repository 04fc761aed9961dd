"""Hears SIGINT and SIGTERM in a thread, so that the second one ends the process also while the main thread is stuck.

Python's own handlers run between two steps of the main thread, which may never come: in an exchange with a rank that
is gone, in a product that takes an hour. The first signal is left to them (interrupt.py); this thread ends the
process at the second one, and ends a rank whose fellow is gone, since no whole step will come any more. Nothing is
caught that is ignored.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from trimtab.errors import TrimtabError
from trimtab.monitor.board import Board
from trimtab.monitor.last_words import OWN_AGENT, end_now, way_on

HEARD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))
# What the main thread gets to end by itself, with its own words, and to leave a rank whose fellow is gone.
_GRACE_SECONDS = 3.0
_FELLOW_GONE_SECONDS = 10.0
_active: SecondSignal | None = None
_ONCE_SECONDS = 1.0


def told_twice_by_torchrun(first: float, second: float) -> bool:
    """A terminal tells torchrun and its processes, and torchrun tells them again: that is one telling.

    `trimtab train` keeps its own torchrun out of the terminal's group, where each telling is one.
    """
    under = "TORCHELASTIC_RUN_ID" in os.environ and OWN_AGENT not in os.environ
    return under and second - first < _ONCE_SECONDS


class SecondSignal:
    """From the beginning of a run to its end, in the process's main thread; elsewhere it does nothing."""

    def __init__(self, say: Callable[[str], None], board: Board | None = None) -> None:
        self._say = say
        self._board = board
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        global _active
        if threading.current_thread() is not threading.main_thread() or _active is not None:
            return self
        # A socket, not a pipe: Windows wakes by nothing else.
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="trimtab-signals", daemon=True)
        self._thread.start()
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        if self._thread is None:
            return
        _active = None
        signal.set_wakeup_fd(self._before)
        self._mouth.close()
        self._thread.join()
        self._thread = None
        self._ear.close()

    def _listen(self) -> None:
        first = second = gone = None
        while True:
            ready, _, _ = select.select([self._ear], [], [], 0.5 if first is not None else None)
            now = time.monotonic()
            for number in self._ear.recv(64) if ready else ():
                if number not in HEARD:
                    continue
                if first is None:
                    first = (now, number)
                elif second is None and not told_twice_by_torchrun(first[0], now):
                    second = (now, number)
            if ready and first is None and self._mouth.fileno() < 0:
                return
            if first is not None and self._mouth.fileno() < 0:
                return
            if second is not None and now - second[0] > _GRACE_SECONDS:
                name = signal.Signals(second[1]).name
                end_now(KeyboardInterrupt(), f"stopped at once, by a second {name}; {way_on()}")
            if first is not None and self._board is not None:
                gone = gone or (now if self._a_fellow_is_gone() else None)
                if gone is not None and now - gone > _FELLOW_GONE_SECONDS:
                    end_now(LostRank("another rank is gone, and this one was told to end"), say="")

    def _a_fellow_is_gone(self) -> bool:
        assert self._board is not None
        others = (report for rank, report in self._board.read().items() if rank != self._board.rank)
        return any(report.state == "failed" or report.process.standing() == "gone" for report in others)


class LostRank(TrimtabError):
    """Another rank ended, so this one could not go on: what it felt, not what was wrong."""

    felt = True


def _leave_in_child() -> None:
    """A forked worker of the data loader shares the socket: a signal to the worker would count as this process's."""
    if _active is not None:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
