"""What the rules about raised errors share: the frames of a traceback and what their variables hold."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import holders, source


def frames_and_lines(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames of an exception's traceback with the line at which each stood, innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[::-1]


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames of an exception's traceback, innermost first."""
    return (frame for frame, _ in frames_and_lines(error))


def values_named(error: BaseException, name: str) -> Iterator[Any]:
    """What the frames of a traceback hold under a name, innermost first."""
    return (frame.f_locals[name] for frame in frames_of(error) if name in frame.f_locals)


def makers_of(file: str, error: BaseException, wanted: Callable[[torch.Tensor], bool]) -> Iterator[ast.stmt]:
    """The statements that gave the failing lines of a file such tensors as they name, innermost frame first."""
    for frame in (frame for frame in frames_of(error) if frame.f_code.co_filename == file):
        for name, tensor in holders.expressions(file, frame.f_lineno, frame):
            made = source.last_assignment(file, frame.f_lineno, name.split("[")[0].split(".")[0])
            if made is not None and wanted(tensor):
                yield made
