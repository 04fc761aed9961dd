"""Which loops of the program have done work, and whether one of them takes its next turn after an error in it.

Work is told by the lines at which it was seen, which costs next to nothing; source is read, and lines are followed,
only from an error on and until the next turn. Frames are not held: they hold tensors.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from trimtab.diagnose import source

_NOT_ITS_OWN = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    *(os.path.join(source.PACKAGE, room, "") for room in ("virtual", "rehearse", "diagnose")),
)


class _At(NamedTuple):
    """A line of a function that is under way."""

    file: str
    first: int
    """The function's own first line."""
    line: int


class _Loop(NamedTuple):
    file: str
    first: int
    head: int
    body: int


class LoopTurns:
    """Follows the loops of one process."""

    def __init__(self, turned: Callable[[], None]) -> None:
        self._turned = turned
        self._steps: set[_At] = set()
        self._passes: set[_At] = set()

    def stepped(self) -> None:
        """A step has been made, here."""
        self._steps.update(at for _, at in _stack(sys._getframe(1)))

    def passed(self) -> None:
        """A pass that is no part of a step has been made, here."""
        self._passes.update(at for _, at in _stack(sys._getframe(1)))

    def failed(self, *, in_a_step: bool) -> None:
        """An error is about to be raised here, and caught: call back at the next turn of a loop that has done work.

        A loop of steps has done none by passes: what a teacher computed is no step.
        """
        if sys.gettrace() not in (None, _nothing):
            return  # somebody else follows the lines: a debugger
        work = self._steps if in_a_step else self._steps | self._passes
        worked = {loop for at in work for loop in _loops(at)}
        awaited: dict[tuple[str, int], set[int]] = {}

        def followed(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and frame.f_lineno in awaited[_function(frame.f_code)]:
                self.stop()
                self._turned()
                return None
            return followed

        for frame, at in _stack(sys._getframe(1)):
            for loop in worked.intersection(_loops(at)):
                # An endless loop has no condition to come back to: its turn begins with its body.
                awaited.setdefault(_function(frame.f_code), set()).update((loop.head, loop.body))
                frame.f_trace = followed
        if awaited:
            sys.settrace(_nothing)

    def stop(self) -> None:
        """Nothing is awaited any more."""
        if sys.gettrace() is _nothing:
            sys.settrace(None)


def _nothing(frame: FrameType, event: str, _: Any) -> None:
    """Of what is called from now on no line is followed."""


def _function(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _stack(frame: FrameType | None) -> Iterator[tuple[FrameType, _At]]:
    """The program's frames, outwards."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_ITS_OWN):
            yield frame, _At(*_function(frame.f_code), frame.f_lineno)
        frame = frame.f_back


def _loops(at: _At) -> list[_Loop]:
    """The loops around a line, in its function."""
    return [
        _Loop(at.file, at.first, node.lineno, node.body[0].lineno)
        for node in source.walk(at.file)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While)
        and at.first <= node.lineno
        and node.body[0].lineno <= at.line <= (node.body[-1].end_lineno or node.body[-1].lineno)
    ]
