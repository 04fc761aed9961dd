"""Ends this process at once, from any thread, also while the main one is inside a call that never returns.

What may be lost by that is told first: the run's folder gets its reason, standard error the way to go on, a launcher
its record. Children (workers of the data loader) are ended too. Nothing here is for the ordinary end of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

from trimtab.redaction import without_secrets

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for the reason of a process that failed."""
OWN_AGENT = "TRIMTAB_RESTART"
"""Set for the processes that `trimtab train` starts by itself: how often it has begun again."""
_KEEPING_SECONDS = 20.0

Keep = Callable[[BaseException], None]

_keep: Keep | None = None
_way_on: Callable[[], str] | None = None
_ending = threading.Lock()


def on_sudden_end(keep: Keep | None, way_on: Callable[[], str] | None = None) -> None:
    """Register what writes the reason into the run's folder, and what says how to go on; None takes it back."""
    global _keep, _way_on
    _keep, _way_on = keep, way_on


def way_on() -> str:
    """How to go on with this run, in words."""
    return _way_on() if _way_on is not None else "training.resume=true goes on from the last checkpoint"


def end_now(
    error: BaseException,
    say: str | None = None,
    code: int = 1,
    before_exit: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Tell, and end. Of several threads that want to the first does. `say`: in place of the error's own text."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()
    keep = _keep
    if keep is not None:
        # In a thread of its own: a disk that hangs as well must not keep the process alive.
        writer = threading.Thread(target=keep, args=(error,), daemon=True)
        writer.start()
        writer.join(_KEEPING_SECONDS)
    tell_launcher(error)
    text = f"error: {error}" if say is None else say
    if text and not told_by_the_launcher():
        # Past Python's own stream, whose lock the main thread may hold for ever.
        with contextlib.suppress(OSError):
            os.write(2, without_secrets(text + "\n").encode(errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        flusher = threading.Thread(target=_flush, args=(stream,), daemon=True)
        flusher.start()
        flusher.join(1.0)
    try:
        before_exit()
        end_children()
    finally:
        os._exit(code)


def told_by_the_launcher() -> bool:
    """Whether this is one of several processes that `trimtab train` started, which ends with one message for all."""
    return OWN_AGENT in os.environ and ERROR_FILE in os.environ


def _flush(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()


def end_children() -> None:
    """Kill what this process started, such as the workers of a data loader."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


def tell_launcher(error: BaseException, **facts: Any) -> None:
    """Leave the reason where torchrun looks for it, in the form that it reads, unless one is there."""
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    now = time.time()
    text = without_secrets(f"{type(error).__name__}: {error}")[:4000]
    own = {
        "kind": type(error).__name__,
        "text": without_secrets(str(error))[:4000],
        "exit_code": getattr(error, "exit_code", 1),
        "comes_again": getattr(error, "comes_again", False),
        "felt": getattr(error, "felt", False),
        "at": now,
        **facts,
    }
    extra = {"py_callstack": "", "timestamp": str(int(now))}
    content = {"message": {"message": text, "extraInfo": extra}, "trimtab": own}
    # The folder is torchrun's own, for the time of the launch; where it is gone nobody asks.
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
