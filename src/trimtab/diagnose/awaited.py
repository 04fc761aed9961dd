"""Whether a program is ready for a GPU that is full: it catches the error, to go on with a smaller batch.

Reads live frames and source. A handler counts where it names the error or asks its text for it; one that only says so
and raises it again, or ends the program, does not.
"""

from __future__ import annotations

import ast
import os
import re
from types import FrameType

import torch

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place

_ABOUT = re.compile(r"out.?of.?memory|\boom\b|_oom|oom_|reduce_batch_size", re.IGNORECASE)
_CATCHING = ("OutOfMemoryError", "RuntimeError", "Exception", "BaseException")
_ENDING = ("exit", "_exit", "abort")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def full_device(frame: FrameType | None) -> Place | None:
    """The line that catches the error of a full GPU, were it raised in this frame; None if it would end the program."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((source.PACKAGE, _TORCH)):
            found = _caught(file, frame.f_lineno, frame.f_code.co_firstlineno)
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _caught(file: str, line: int, first: int) -> Place | None:
    around = [
        node
        for node in source.walk(file)
        if isinstance(node, ast.Try)
        and first <= node.lineno <= line <= (node.body[-1].end_lineno or node.body[-1].lineno)
    ]
    for node in sorted(around, key=lambda node: -node.lineno):
        handler = next((one for one in node.handlers if _catches(one)), None)
        if handler is not None and _ABOUT.search(ast.unparse(handler)) and not _ends(handler):
            return source.place(file, handler.lineno)
    return None


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind).split(".")[-1] in _CATCHING for kind in kinds)


def _ends(handler: ast.ExceptHandler) -> bool:
    """Whether a handler goes on with nothing, whatever it was given."""
    last = handler.body[-1]
    called = last.value.func if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return isinstance(last, ast.Raise) or name in _ENDING
