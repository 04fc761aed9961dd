"""What the rules about raised errors share: the frames of a traceback and what their variables hold."""

from __future__ import annotations

import ast
import os
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
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


def own_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames of the user's own files in a traceback, with their lines, innermost first."""
    return [(f, line) for f, line in frames_and_lines(error) if source.is_user_file(f.f_code.co_filename)]


def known_here(error: BaseException, wanted: Callable[[Any], bool]) -> Iterator[tuple[FrameType, str, Any]]:
    """The variables of the user's frames (innermost first), then of their modules, that hold such a thing."""
    frames = [frame for frame, _ in own_frames(error)]
    tables = [(frame, frame.f_locals) for frame in frames] + [(frame, frame.f_globals) for frame in frames]
    for frame, table in tables:
        for name, value in list(table.items()):
            plain = not name.startswith("__") and not isinstance(value, type | ModuleType)
            if plain and wanted(value):
                yield frame, name, value


def called_by(error: BaseException, *functions: str) -> FrameType | None:
    """The innermost frame of torch's own functional module that runs one of these functions."""
    named = (frame for frame in frames_of(error) if frame.f_code.co_name in functions)
    return next(
        (f for f in named if f.f_code.co_filename.endswith(os.path.join("nn", "functional.py"))), None
    )
