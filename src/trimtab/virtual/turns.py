"""Loops of which each turn does the same with tensors of the same sizes: by shapes a few of them stand for all.

For loops whose turns let go again what they allocate, at the latest in the next one: after the first ones each finds
the memory as the last but one did. Kernels are counted as often as there are turns. With values all are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from trimtab.virtual import unknown, work

Turn = TypeVar("Turn")
_MOST = 7


def of(turns: Sequence[Turn], tensor: Tensor) -> Iterator[Turn]:
    """The turns that are made: all, or where the tensor has no values those that stand for all. The last one may be
    shorter than the others."""
    if len(turns) <= _MOST or not unknown.is_unknown(tensor):
        yield from turns
        return
    first = _MOST - 2 + len(turns) % 2  # as many, or as few, by twos
    yield from turns[: first - 1]
    tally = work.listening()
    if tally is None:
        yield turns[first - 1]
    else:
        with tally.standing_for(tally.section, tally.times * (len(turns) - first)):
            yield turns[first - 1]
    yield turns[-1]
