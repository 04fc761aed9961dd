"""Python's search for circles of garbage, put off while a program imports its libraries: it finds nothing there.

It looks at some hundred thousand objects of torch and transformers again and again, a tenth of a short rehearsal. It is
as the program would have it before anything is on a GPU, whose memory garbage could hold; a program that sets it itself
is left alone.
"""

from __future__ import annotations

import gc

_SELDOM = (20_000, 20, 20)
_before: tuple[int, int, int] | None = None


def put_off() -> None:
    """Look seldom, from now on."""
    global _before
    if _before is None and gc.isenabled():
        _before = gc.get_threshold()
        gc.set_threshold(*_SELDOM)


def resume(*, models: bool = True) -> None:
    """Look as often as Python does, from now on.

    Without any model yet (`models` false), what is there are libraries: they are not looked at again.
    """
    global _before
    if _before is None:
        return
    if gc.get_threshold() == _SELDOM:
        gc.set_threshold(*_before)
        if not models and gc.isenabled():
            gc.freeze()
    _before = None
