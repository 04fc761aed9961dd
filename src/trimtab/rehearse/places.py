"""Where in the user's own code something happens. Reads frames and source lines; never runs or changes anything.

A frame is the user's when its file lies outside torch, installed packages, the standard library and Trimtab itself.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from functools import lru_cache
from types import FrameType, TracebackType

from trimtab.diagnose.finding import Cause, Place

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = tuple(
    {os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")}
    | {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")}
)


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a source file belongs to the user's own program."""
    if file.startswith("<") or not file:
        return False
    path = os.path.abspath(file)
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not any(path.startswith(root + os.sep) for root in (_PACKAGE, *_STDLIB))


def place_of(file: str, line: int) -> Place:
    """A place with the code that stands there."""
    return Place(file, line, linecache.getline(file, line).strip())


def frames(start: FrameType | None = None) -> list[FrameType]:
    """The user's frames on this thread's stack, innermost first."""
    found: list[FrameType] = []
    frame = start or sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def here() -> Place | None:
    """The innermost line of the user's code on the stack, if there is any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return place_of(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def traceback_places(traceback: TracebackType | None) -> list[Place]:
    """All frames of a traceback that are not ours, innermost first."""
    found: list[Place] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not os.path.abspath(file).startswith(_PACKAGE + os.sep):
            found.append(place_of(file, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found[::-1]


def cause_at(place: Place | None, why: str) -> Cause | None:
    """The same place as a cause."""
    return Cause(place.file, place.line, place.code, why) if place else None


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module | None:
    source = "".join(linecache.getlines(file))
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def loop_around(place: Place) -> Place | None:
    """The first line of the body of the innermost loop statement that holds this line beneath its header.

    That is where a call that belongs once into every round of the loop would stand.
    """
    loop = _loop(place)
    return place_of(place.file, loop.body[0].lineno) if loop else None


def _loop(place: Place) -> ast.For | ast.While | None:
    tree = _tree(place.file)
    best: ast.For | ast.While | None = None
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.For | ast.While):
            continue
        if node.body[0].lineno <= place.line <= (node.end_lineno or 0) and (
            not best or node.lineno > best.lineno
        ):
            best = node
    return best


def loop_header(place: Place) -> Place | None:
    """The header of the innermost loop statement around a line."""
    loop = _loop(place)
    return place_of(place.file, loop.lineno) if loop else None


def idle_context(place: Place) -> Place | None:
    """Where the `nullcontext()` of a `with` statement around a line is made, if there is one."""
    tree = _tree(place.file)
    nodes = list(ast.walk(tree)) if tree else []
    for statement in nodes:
        if not isinstance(statement, ast.With) or not statement.lineno <= place.line <= (
            statement.end_lineno or 0
        ):
            continue
        for item in statement.items:
            if _makes_nothing(item.context_expr):
                return place_of(place.file, item.context_expr.lineno)
            for node in nodes:
                if (
                    isinstance(node, ast.Assign)
                    and node.lineno < statement.lineno
                    and _makes_nothing(node.value)
                ):
                    names = {getattr(target, "id", None) for target in node.targets}
                    if getattr(item.context_expr, "id", "") in names:
                        return place_of(place.file, node.lineno)
    return None


def _makes_nothing(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) == "nullcontext"


def appending_line(file: str, name: str) -> Place | None:
    """The first line that appends to the list of this name, or adds to it."""
    tree = _tree(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target, method = node.func.value, node.func.attr
            if method in {"append", "extend", "insert"} and name == getattr(
                target, "id", getattr(target, "attr", "")
            ):
                return place_of(file, node.lineno)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return place_of(file, node.lineno)
    return None


def return_line(function: object, constructs: str) -> Place | None:
    """The `return` of a function that builds an object of the named class, else its last `return`."""
    code = getattr(function, "__code__", None)
    tree = _tree(code.co_filename) if code else None
    if code is None or tree is None:
        return None
    lines: list[tuple[bool, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if not node.lineno - len(node.decorator_list) - 1 <= code.co_firstlineno <= node.lineno:
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(inner.value)}
                    lines.append((constructs in names, inner.lineno))
    return place_of(code.co_filename, max(lines)[1]) if lines else None


def choice_of(file: str, line: int, attribute: str) -> Place | None:
    """The condition inside the function at a line on which `self.attribute` is used."""
    tree = _tree(file)
    for function in ast.walk(tree) if tree else ():
        if not isinstance(function, ast.FunctionDef) or not function.lineno - 8 <= line <= function.lineno:
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.If | ast.IfExp):
                continue
            branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
            for inner in (n for branch in branches for n in ast.walk(branch)):
                if isinstance(inner, ast.Attribute) and inner.attr == attribute:
                    return place_of(file, node.lineno)
    return None


def way_out(place: Place) -> Place | None:
    """Why a loop around a line may end earlier on one rank: a condition that leaves it, a count that depends on the
    rank, else its header."""
    loop = _loop(place)
    if loop is None:
        return None
    header = loop.iter if isinstance(loop, ast.For) else loop.test
    if "rank" in ast.unparse(header):
        return place_of(place.file, loop.lineno)
    tree = _tree(place.file)
    names = {node.id for node in ast.walk(header) if isinstance(node, ast.Name)}
    for node in ast.walk(tree) if tree else ():
        if (
            not isinstance(node, ast.Assign)
            or node.lineno > loop.lineno
            or "rank" not in ast.unparse(node.value)
        ):
            continue
        if names & {getattr(target, "id", None) for target in node.targets}:
            return place_of(place.file, node.lineno)
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Break | ast.Return) for inner in node.body):
            return place_of(place.file, node.lineno)
    return place_of(place.file, loop.lineno)
