"""Where in the user's own code something happens, read from live frames and tracebacks; never runs or changes anything.

What a line says is for `diagnose.source` to read, and whether it is the user's own.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place

OURS = tuple(os.path.join(source.PACKAGE, room, "") for room in ("virtual", "rehearse", "diagnose"))
"""The rooms that stand between a rehearsed program and torch. The others may be the program itself."""


def frames() -> Iterator[FrameType]:
    """The user's frames on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if source.is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def forget(frame: FrameType) -> None:
    """Before 3.13 a frame keeps the dict that was asked of it, with every graph in it: empty it if it is ours alone."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values = frame.f_locals
        # The frame, this name, and the argument of the call.
        if sys.getrefcount(values) == 3:
            values.clear()


def forget_all() -> None:
    """The same for every frame on this thread's stack: who has looked at them would keep what the program lets go."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        forget(frame)
        frame = frame.f_back


def here() -> Place | None:
    """The innermost line of the user's code on the stack, if there is any."""
    frame = next(frames(), None)
    return source.place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def traceback_places(traceback: TracebackType | None) -> list[Place]:
    """All frames of a traceback that are not ours, innermost first."""
    found: list[Place] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not os.path.abspath(file).startswith(source.PACKAGE):
            found.append(source.place(file, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found[::-1]


def first_own(stack: list[Place]) -> Place | None:
    """The innermost of these lines that is the user's."""
    return next((place for place in stack if source.is_user_file(place.file)), None)
