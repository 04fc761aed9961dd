"""What a process leaves out while it starts: searching its modules for garbage.

Imports make a million objects that live as long as the process, and Python's collector goes over all of them again and
again as they come: a fifth of the time to the first step. It is held back until the work begins, and what is there by
then is never looked at again. Nothing heavy is imported here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = (200_000, 20, 100)
"""Rarely, not never: what reads a large file in between still gives back what it makes."""
_usual: tuple[int, int, int] | None = None
_settled = False


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
