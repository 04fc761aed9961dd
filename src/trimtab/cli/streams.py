"""Standard output and error that may fail: a run of a night does not end because nobody reads what it prints.

A reader that went away (`| head -1`, a closed terminal), a log on a full disk, a stream that was closed before the
start: what is printed is lost, which the other stream says once, and the verb goes on. Never hides it: a verb whose
result is what it prints ends with exit code 1. Files that a verb writes are no matter of this one.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = {1: "standard output", 2: "standard error"}


class _Steady(io.FileIO):
    """A stream of the process that takes what it is given also when the system does not."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        if self.failed is None:
            try:
                return super().write(data) or 0
            except BlockingIOError:
                raise
            except OSError as error:
                self.failed = error
                self._tell_the_other(error)
        return memoryview(data).nbytes

    def _tell_the_other(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            return  # whoever read it has seen enough
        number = self.fileno()
        text = (
            f"{_NAMES[number]} cannot be written to any more\n  why: {error.strerror or error}\n"
            "  change: nothing for this command, which goes on; let the next one print elsewhere\n"
        )
        try:
            os.write(3 - number, f"warning: {text}".encode())
        except OSError:
            return  # neither can be written to: there is nobody to tell


@contextmanager
def steady_streams() -> Iterator[_Steady | None]:
    """Around a verb. Yields standard output where it is the process's own; a stream that somebody put there is left."""
    _open_what_was_closed()
    before = sys.stdout, sys.stderr
    output = _steadied("stdout", 1)
    _steadied("stderr", 2)
    try:
        yield output
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if before[0] is not None and before[1] is not None:
            sys.stdout, sys.stderr = before


def _steadied(name: str, number: int) -> _Steady | None:
    stream = getattr(sys, name)
    if type(stream) is not io.TextIOWrapper or _number_of(stream) != number:
        return None
    stream.flush()
    raw = _Steady(number)
    text = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, text)
    return raw


def _number_of(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _open_what_was_closed() -> None:
    """`>&-`: else the next file that is opened gets the number, and what a library prints goes into it."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life
