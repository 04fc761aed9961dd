"""SIGTERM and SIGHUP end a verb as Ctrl-C does: what it was writing is taken back, and the exit code is 1.

By itself the system ends the process where it stands, without a word. A training has handlers of its own meanwhile
(recipes/interrupt.py). What is ignored (nohup, a background job) stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HEARD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def left_to_the_system() -> None:
    """Let SIGTERM and SIGHUP end the process where it stands: a guard of the verb's own then clears up behind it."""
    if threading.current_thread() is threading.main_thread():
        for number in _HEARD:
            if number != signal.SIGINT and callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Around a verb, in the main thread. Yields the names of the signals that came, in their order."""
    names: list[str] = []
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != process:
            # A forked worker: it ends as it would have without us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        names.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    of_a_launcher = "TORCHELASTIC_RUN_ID" in os.environ  # which knows by the signal why a rank ended
    if threading.current_thread() is threading.main_thread() and not of_a_launcher:
        for number in _HEARD:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, end)
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
