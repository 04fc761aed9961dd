"""Whether something on the stack may handle the error of a full GPU: `except` clauses, and context managers that
swallow what is raised inside them.

Reads live frames and source, and calls nothing of the program. It says what *may* take the error: whether the program
then goes on, only its run can tell. A clause that ends by raising passes on what it raises, which another may take.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.handlers import outcome

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_WATCHING = tuple(os.path.join(source.PACKAGE, room, "") for room in ("virtual", "rehearse", "diagnose"))
"""Rooms of Trimtab that stand on the stack of any rehearsed program; the others are the program."""
_DOOR = os.path.join(source.PACKAGE, "cli", "")
"""Trimtab's own verbs. What leaves one ends the program with a message: what parses the command line, around it, lets
errors pass, though its source alone does not say so."""
_CLASS = type[BaseException]
_Names = Mapping[str, Any]


def full_device(frame: FrameType | None) -> Place | None:
    """The line that would take the error of a full GPU, were it raised in this frame; None if none would."""
    raised: set[_CLASS] = {torch.OutOfMemoryError}
    left_a_verb = False
    while frame is not None and raised:
        code = frame.f_code
        ours = code.co_filename.startswith(_DOOR)
        asked = not code.co_filename.startswith((*_WATCHING, _TORCH)) and (ours or not left_a_verb)
        # Past the end of a GPU's memory this is asked thousands of times, and most lines have nothing around them.
        if asked and _around(code, frame.f_lineno):
            names = ChainMap(frame.f_locals, frame.f_globals)
            found = _taken(code, frame.f_lineno, names, raised)
            if found is not None:
                return found
        left_a_verb |= ours
        frame = frame.f_back
    return None


def _taken(code: CodeType, line: int, names: _Names, raised: set[_CLASS]) -> Place | None:
    """Go outwards from a line through one function; `raised` becomes what leaves it."""
    file = code.co_filename
    for node in _around(code, line):
        if isinstance(node, ast.Try):
            handler = _taken_by_clause(node, names, raised)
            if handler is not None:
                return source.place(file, handler.lineno)
        elif any(_swallows(item.context_expr, names, raised) for item in reversed(node.items)):
            return source.place(file, node.lineno)
    return None


@cache
def _around(code: CodeType, line: int) -> list[ast.Try | ast.With]:
    """What in a function stands around one of its lines and may take an error, the innermost first."""
    first = code.co_firstlineno
    around = [
        node
        for node in source.guarded(code.co_filename)
        if first <= node.lineno <= line
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or node.body[-1].lineno)
    ]
    return sorted(around, key=lambda node: (-node.lineno, -node.col_offset))


def _taken_by_clause(node: ast.Try, names: _Names, raised: set[_CLASS]) -> ast.ExceptHandler | None:
    left: set[_CLASS] = set()
    for kind in raised:
        handler = next((one for one in node.handlers if _matches(one.type, names, kind)), None)
        if handler is None:
            left.add(kind)
            continue
        goes_on, raises = outcome(handler)
        if goes_on:
            return handler
        for error in raises:
            # A call of something that is no class makes an error that nobody can know here.
            made = _resolved(error, names) if error is not None else kind
            left.add(made if _is_error(made) else Exception)
    raised.clear()
    raised |= left
    return None


def _matches(named: ast.expr | None, names: _Names, kind: _CLASS) -> bool:
    if named is None:
        return True
    listed = named.elts if isinstance(named, ast.Tuple) else [named]
    for one in listed:
        found = _resolved(one, names)
        kinds = found if isinstance(found, tuple) else (found,)
        if any(_is_error(known) and issubclass(kind, known) for known in kinds):
            return True
    return False


def _is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def _resolved(node: ast.expr, names: _Names) -> Any:
    """What a dotted name, or what is called by one, stands for; None where that would run code of the program."""
    if isinstance(node, ast.Call):
        return _resolved(node.func, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, None))
    if not isinstance(node, ast.Attribute):
        return None
    owner = _resolved(node.value, names)
    if owner is None:
        return None
    found = inspect.getattr_static(owner, node.attr, None)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _swallows(opened: ast.expr, names: _Names, raised: set[_CLASS]) -> bool:
    """Whether a context manager may end the error, or (of a generator) make another of it."""
    manager = _resolved(opened, names)
    if manager is contextlib.suppress and isinstance(opened, ast.Call):
        return any(_matches(one, names, kind) for one in opened.args for kind in raised)
    if isinstance(manager, contextlib.suppress):
        return any(issubclass(kind, getattr(manager, "_exceptions", ())) for kind in raised)
    if isinstance(opened, ast.Call) and manager is contextlib._GeneratorContextManager._recreate_cm:
        manager = names.get("self")  # one that decorates a function
    if isinstance(manager, contextlib._GeneratorContextManager):
        manager = getattr(manager, "func", None)
    if (generator := getattr(manager, "__wrapped__", manager)) and inspect.isgeneratorfunction(generator):
        return _taken_at_yield(generator, raised)
    kind = manager if isinstance(manager, type) else type(manager)
    leave = inspect.getattr_static(kind, "__exit__", None)
    return isinstance(leave, FunctionType) and _may_say_yes(leave)


def _taken_at_yield(generator: Any, raised: set[_CLASS]) -> bool:
    code = generator.__code__
    if code.co_filename.startswith(_TORCH):
        return False
    at = _yields_at(code)
    if at is None or not _around(code, at):
        return False
    names = ChainMap(dict(inspect.getclosurevars(generator).nonlocals), generator.__globals__)
    return _taken(code, at, names, raised) is not None


@cache
def _yields_at(code: CodeType) -> int | None:
    return next((node.lineno for node in _inside(code) if isinstance(node, ast.Yield)), None)


def _may_say_yes(leave: FunctionType) -> bool:
    """Whether an `__exit__` may answer that the error is dealt with."""
    code = leave.__code__
    if code.co_filename.startswith((*_WATCHING, _TORCH)) or code.co_filename == contextlib.__file__:
        return False
    returned = (node.value for node in _inside(code) if isinstance(node, ast.Return))
    return any(
        value is not None
        and not (isinstance(value, ast.Constant) and not value.value)
        and not (isinstance(value, ast.Call) and source.called_name(value) == "__exit__")
        for value in returned
    )


def _inside(code: CodeType) -> Iterator[ast.AST]:
    """The nodes of a function."""
    function = source.function_at(code.co_filename, code.co_firstlineno)
    return ast.walk(function) if function is not None else iter(())
