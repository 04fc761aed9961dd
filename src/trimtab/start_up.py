"""What a process does once, so that what follows takes less time: it leaves out searching its modules for garbage while
it starts, and has room for its calls.

Imports make a million objects that live as long as the process, and Python's collector goes over all of them again and
again as they come: a fifth of the time to the first step. It is held back until the work begins, and what is there by
then is never looked at again. Nothing heavy is imported here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Called = TypeVar("_Called", bound=Callable[..., Any])

_RARELY = (200_000, 20, 100)
"""Rarely, not never: what reads a large file in between still gives back what it makes."""
_usual: tuple[int, int, int] | None = None
_settled = False


_FRAMES = 70_000
"""Words for a frame that no piece of half a mebibyte holds: it gets a whole one, whose rest is for those inside."""


def roomy(function: _Called) -> _Called:
    """Let a function's calls, however deep, lie in one piece of memory beside its own frame.

    Python takes memory for frames in pieces of 16 KiB from the kernel, and gives each back as soon as its first frame
    ends: a loop that calls across the end of a piece asks the kernel for memory in every turn, a tenth of a training by
    shapes. What is never written to of the piece takes no memory.
    """
    given: Any = function
    given.__code__ = given.__code__.replace(co_stacksize=_FRAMES)
    return function


@contextmanager
def collector_held() -> Iterator[None]:
    """Collect rarely from here to `settle`, or to the end. A process whose work has begun is left as it is."""
    global _usual
    if _settled or _usual is not None or not gc.isenabled():
        yield
        return
    _usual = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        _as_usual()


def settle() -> None:
    """The work begins, and no weights are loaded yet: collect as usual, but leave alone what the imports made."""
    global _settled
    if _usual is not None and not _settled:
        _settled = True
        gc.freeze()
    _as_usual()


def _as_usual() -> None:
    global _usual
    if _usual is not None:
        gc.set_threshold(*_usual)
        _usual = None
