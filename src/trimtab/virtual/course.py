"""The blocks that a kernel takes for itself, in the order in which they come and go.

How much is allocated at most hangs on their sum; what is reserved hangs on their order and sizes too: where a block
lies decides what is free in one piece beside it.
"""

from __future__ import annotations

from enum import Enum

from trimtab.virtual.memory import Block
from trimtab.virtual.state import VirtualDevice


class Made(Enum):
    """A place in a course at which results are made."""

    NEXT = "the next of several"
    ALL = "all that are left"


NEXT, RESULT = Made.NEXT, Made.ALL
Taken = int | tuple[int | Made, ...]
"""The bytes of the one block that lives inside an operation; or of several in their order, with the places of results
among them: below nought where a block is given back before the end, nought where there is none."""


def together(*sizes: int) -> Taken:
    """Blocks that are taken one after the other: a plain number where there is one, or none."""
    found = tuple(nbytes for nbytes in sizes if nbytes)
    return found if len(found) > 1 else sum(found)


class Course:
    """A course while it is gone through; it begins with what comes before the first result."""

    __slots__ = ("_at", "_blocks", "_device", "_steps")

    def __init__(self, steps: tuple[int | Made, ...], device: VirtualDevice) -> None:
        self._steps, self._device = steps, device
        self._at = 0
        self._blocks: list[Block] = []
        self.go_on()

    def go_on(self) -> None:
        """To the place of the next result, or of all that are left."""
        while self._at < len(self._steps):
            step = self._steps[self._at]
            if step is RESULT:
                return
            self._at += 1
            if step is NEXT:
                return
            self._take(step)

    def end(self) -> None:
        """What comes behind the results; then all is given back, the last first."""
        for step in self._steps[self._at :]:
            self._take(step)
        while self._blocks:
            self._blocks.pop()

    def _take(self, step: int | Made) -> None:
        if isinstance(step, Made) or not step:
            return
        if step > 0:
            self._blocks.append(Block(self._device, step))
        else:
            del self._blocks[max(at for at, block in enumerate(self._blocks) if block.nbytes == -step)]
