"""What the rules about raised errors share: the frames of a traceback, and constants in source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames of an exception's traceback, innermost first."""
    found = []
    traceback = error.__traceback__
    while traceback is not None:
        found.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return iter(found[::-1])


def values_named(error: BaseException, name: str) -> Iterator[Any]:
    for frame in frames_of(error):
        if name in frame.f_locals:
            yield frame.f_locals[name]


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_false(nodes: Sequence[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant) and nodes[0].value is False
