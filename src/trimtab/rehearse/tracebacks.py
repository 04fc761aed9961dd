"""Tracebacks as the program's own machine would print them: without the frames that a rehearsal adds.

Wherever Python words a traceback (uncaught errors, threads, logging, the text that a worker or a spawned rank sends)
our own frames are left out, and those of torch that only lead to them. The error itself is never changed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from typing import Any

from trimtab.rehearse.places import OURS
from trimtab.rehearse.shield import DEBUG

_OVERRIDES = os.path.join("torch", "overrides.py")
_OPERATIONS = os.path.join("torch", "_ops.py")


def shown(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that would be there without a rehearsal; all of them when there is no other."""
    kept: list[traceback.FrameSummary] = []
    after_ours = False
    for frame in frames:
        if not frame.filename.startswith(OURS):
            # An operation on the values behind a virtual tensor is called by name, not in C++.
            if not (after_ours and frame.filename.endswith(_OPERATIONS)):
                kept.append(frame)
            after_ours = False
            continue
        after_ours = True
        # torch asks who overrides a function, which nobody does without virtual GPUs, and then calls it once more.
        if kept and kept[-1].filename.endswith(_OVERRIDES):
            kept.pop()
            if kept and "handle_torch_function(" in (kept[-1].line or ""):
                kept.pop()
    return kept or frames


def leave_out_our_frames() -> None:
    """From now on in this process; with TRIMTAB_DEBUG set all frames are shown."""
    if os.environ.get(DEBUG):
        return
    real = traceback.TracebackException.__init__

    @functools.wraps(real)
    def init(self: traceback.TracebackException, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.stack = traceback.StackSummary.from_list(shown(list(self.stack)))

    traceback.TracebackException.__init__ = init  # type: ignore[method-assign]
    threading.excepthook = _of_a_thread


def print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What `sys.excepthook` prints by itself, past Python's own printing in C."""
    traceback.print_exception(kind, error, trace)


def _of_a_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    name = args.thread.name if args.thread is not None else threading.get_ident()
    print(f"Exception in thread {name}:", file=sys.stderr)
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
