"""The one reader of a program's source: where a name was last set, which line sets an attribute, who moved a sibling.

Reads source lines only (through linecache and ast); runs nothing. A file that cannot be read or parsed answers nothing.
Questions about loops, conditions and returns are in `flow`.
"""

from __future__ import annotations

import ast
import linecache
import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeGuard

from trimtab.diagnose.finding import Cause, Place
from trimtab.virtual.packages import brought_along

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = tuple(
    os.path.join(form(sysconfig.get_paths()[name]), "")
    for name in ("stdlib", "platstdlib")
    for form in (str, os.path.realpath)
)
MOVES = frozenset({"to", "cuda", "cpu", "to_empty", "half", "float", "bfloat16", "double", "mps", "xpu"})
"""Methods that give back a moved or cast tensor."""

_SETTING = ast.Assign | ast.AnnAssign | ast.AugAssign
_TO_DEVICE = ("to", "cuda", "mps")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a file is the user's own: outside installed packages, the standard library and Trimtab itself. Needs no
    torch, unlike the virtual machine's own test, which every operation makes."""
    path = os.path.abspath(file)
    if not file or file.startswith("<") or {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return False
    return not path.startswith((PACKAGE, *_LIBRARIES, *brought_along()))


def place(file: str, line: int) -> Place:
    """A place with the code that stands there."""
    return Place(file, line, linecache.getline(file, line).strip())


def cause(file: str, line: int, why: str) -> Cause:
    """A cause with the code that stands there."""
    return Cause(file, line, linecache.getline(file, line).strip(), why)


@lru_cache(maxsize=128)
def tree(file: str) -> ast.Module | None:
    """The parsed file."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def statement(file: str, line: int) -> ast.stmt | None:
    """The innermost statement that stands on a line (of a compound one only its header counts)."""
    found = [n for n in _statements(tree(file)) if n.lineno <= line <= _header_end(n)]
    return max(found, key=lambda n: (n.lineno, n.col_offset), default=None)


def node_at(file: str, start: tuple[int, int], end: tuple[int, int]) -> ast.expr | None:
    """The expression that stands exactly between two places (line and column as ast counts)."""
    for node in walk(file):
        if not isinstance(node, ast.expr) or (node.lineno, node.col_offset) != start:
            continue
        if (node.end_lineno, node.end_col_offset) == end:
            return node
    return None


@lru_cache(maxsize=64)
def _parents(file: str) -> dict[ast.AST, ast.AST]:
    return {child: node for node in walk(file) for child in ast.iter_child_nodes(node)}


def above(file: str, node: ast.AST) -> Iterator[ast.AST]:
    """What holds a node, from the inside out."""
    parents = _parents(file)
    while (up := parents.get(node)) is not None:
        yield up
        node = up


def statement_of(file: str, node: ast.AST) -> ast.stmt | None:
    """The statement that an expression is a part of."""
    return next((n for n in above(file, node) if isinstance(n, ast.stmt)), None)


def function_at(file: str, line: int) -> Function | None:
    """The innermost function that holds a line."""
    found = [n for n in _functions(tree(file)) if _first_line(n) <= line <= (n.end_lineno or 0)]
    return max(found, key=lambda n: n.lineno, default=None)


def _first_line(function: Function) -> int:
    """As Python counts: the decorators belong to the function."""
    return min(node.lineno for node in (function, *function.decorator_list))


def class_at(file: str, line: int) -> ast.ClassDef | None:
    """The innermost class that holds a line."""
    found = [n for n in walk(file) if isinstance(n, ast.ClassDef) and n.lineno <= line <= (n.end_lineno or 0)]
    return max(found, key=lambda n: n.lineno, default=None)


def classes(file: str, name: str) -> list[ast.ClassDef]:
    """The classes of this name in a file."""
    return [n for n in walk(file) if isinstance(n, ast.ClassDef) and n.name == name]


def scope_at(file: str, line: int) -> ast.AST:
    """What holds the names of a line: its function, else the module (of a file that cannot be read: nothing)."""
    return function_at(file, line) or tree(file) or ast.Pass()


def assignments(file: str, line: int, name: str) -> list[ast.stmt]:
    """The statements that bind a name in the scope of a line, in order."""
    return [node for node in own_statements(scope_at(file, line)) if name in bound(node)]


def last_assignment(file: str, line: int, name: str) -> ast.stmt | None:
    """The statement that last bound a name before a line of the same scope (else of the module)."""
    before = [node for node in assignments(file, line, name) if node.lineno < line]
    if before:
        return before[-1]
    module = tree(file)
    if module is None or function_at(file, line) is None or name in parameters(file, line):
        return None
    outside = [node for node in own_statements(module) if name in bound(node)]
    return outside[-1] if outside else None


def value_for(made: ast.stmt, name: str) -> ast.expr | None:
    """What an assignment gives to a name: its own part of `a, b = x, y`, else the whole value."""
    value: ast.expr | None = getattr(made, "value", None)
    given = pairs(made) if isinstance(made, ast.Assign) else ()
    return next((right for left, right in given if isinstance(left, ast.Name) and left.id == name), value)


def pairs(made: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment sets, each with what it is given: its own part of `a, b = x, y`, else the whole value."""
    for target in made.targets:
        if isinstance(target, ast.Tuple) and isinstance(made.value, ast.Tuple):
            yield from zip(target.elts, made.value.elts, strict=False)
        else:
            yield target, made.value


def parameters(file: str, line: int) -> list[str]:
    """The parameters of the function around a line, without self."""
    function = function_at(file, line)
    if function is None:
        return []
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def collators_of(file: str) -> set[str]:
    """The functions of this name that are given to a loader or trainer to make batches with."""
    given = [keyword(call, key) for call in calls(file) for key in ("collate_fn", "data_collator")]
    return {function.id for function in given if isinstance(function, ast.Name)}


def device_choice(file: str, line: int) -> int | None:
    """The line that set the device, or its number, which a line uses: `device = "cuda:1"`, `rank = int(...)`."""
    node = statement(file, line)
    names = sorted(names_in(node)) if node is not None else []
    made = [m for name in names if (m := last_assignment(file, line, name)) is not None]
    wanted = ("cuda", "device", "rank")
    for statement_ in sorted(made, key=lambda m: "cuda" not in ast.unparse(m)):
        value = getattr(statement_, "value", None)
        # A model that was put on a device is no choice of a device.
        if value is None or has_move(value):
            continue
        if any(word in ast.unparse(statement_).lower() for word in wanted):
            return statement_.lineno
    return None


def contexts_around(file: str, line: int) -> list[ast.expr]:
    """What the `with` blocks of the same function that hold a line open, innermost first."""
    function = function_at(file, line)
    withs = [n for n in (ast.walk(function) if function else walk(file)) if isinstance(n, ast.With)]
    around = [n for n in withs if n.body[0].lineno <= line <= (n.end_lineno or 0)]
    return [item.context_expr for n in sorted(around, key=lambda n: -n.lineno) for item in n.items]


def attribute_assignment(file: str, class_name: str, attribute: str, preferred: int = 0) -> int | None:
    """The line of a class that sets `self.attribute`: `preferred` if it does, else in __init__ if it stands there.

    What was made at another line, `preferred`, is not what a line sets that makes a tensor itself."""
    lines: list[tuple[bool, bool, bool, int]] = []
    inside = [m for owner in classes(file, class_name) for m in owner.body]
    for method in (m for m in inside if isinstance(m, Function)):
        for inner in ast.walk(method):
            if (
                isinstance(inner, _SETTING)
                and attribute in self_targets(inner)
                and not _sets_none(inner, attribute)
            ):
                anew = bool(preferred) and _makes_anew(inner)
                lines.append((inner.lineno != preferred, anew, method.name != "__init__", inner.lineno))
    return min(lines)[3] if lines else None


def hidden_assignment(file: str, class_name: str, attribute: str) -> int | None:
    """The line of a class that keeps something past its own table: `object.__setattr__(self, "x", …)`,
    `self.__dict__["x"] = …`."""
    for node in (n for owner in classes(file, class_name) for n in ast.walk(owner)):
        if isinstance(node, ast.Call) and called_name(node) == "__setattr__" and len(node.args) >= 2:
            key: ast.expr = node.args[-2]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) not in ("self.__dict__", "vars(self)"):
                continue
            key = node.slice
        else:
            continue
        if isinstance(key, ast.Constant) and key.value == attribute:
            return node.lineno
    return None


def _makes_anew(node: ast.stmt) -> bool:
    made = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return any(last_name(f) in ("clone", "deepcopy") or root(f) == "torch" for f in made)


def calls(file: str, *names: str) -> list[ast.Call]:
    """The calls in a file: of something by one of these names (`Name(…)` or `x.Name(…)`), or all."""
    found = [node for node in walk(file) if isinstance(node, ast.Call)]
    return [call for call in found if called_name(call) in names] if names else found


def call_on(file: str, line: int) -> Iterator[ast.Call]:
    """The calls written on a line's statement."""
    return (inner for inner in header(statement(file, line)) if isinstance(inner, ast.Call))


def methods_on(file: str, line: int, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The calls of such methods on a line's statement, each with what it is called on."""
    for call in call_on(file, line):
        if isinstance(call.func, ast.Attribute) and call.func.attr in names:
            yield call, call.func.value


def called_name(call: ast.Call) -> str:
    """The last part of what is called: `Linear` in nn.Linear(…)."""
    return last_name(call.func)


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is just this value."""
    return isinstance(node, ast.Constant) and node.value is value


def walk(file: str) -> Iterator[ast.AST]:
    """Every node of a file."""
    return iter(_nodes(tree(file)))


# A diagnosis asks the same file some hundred times.
@lru_cache(maxsize=128)
def _nodes(module: ast.Module | None) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module)) if module is not None else ()


def guarded(file: str) -> tuple[ast.Try | ast.With, ...]:
    """What may take an error that is raised inside of it."""
    return _guarded(tree(file))


# Past the end of a GPU's memory every allocation asks, of every file on the stack.
@lru_cache(maxsize=128)
def _guarded(module: ast.Module | None) -> tuple[ast.Try | ast.With, ...]:
    return tuple(node for node in _nodes(module) if isinstance(node, ast.Try | ast.With))


@lru_cache(maxsize=128)
def _statements(module: ast.Module | None) -> tuple[ast.stmt, ...]:
    return tuple(node for node in _nodes(module) if isinstance(node, ast.stmt))


@lru_cache(maxsize=128)
def _functions(module: ast.Module | None) -> tuple[Function, ...]:
    return tuple(node for node in _nodes(module) if isinstance(node, Function))


def names_in(node: ast.AST) -> set[str]:
    """The plain names that an expression reads."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def own_statements(scope: ast.AST) -> list[ast.stmt]:
    """The statements of a scope in order, without those of functions and classes inside it."""
    found: list[ast.stmt] = []
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.stmt):
            found.append(node)
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))
    return sorted(found, key=lambda node: node.lineno)


def bound(node: ast.AST | None) -> set[str]:
    """The names that a statement binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        targets = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    return {
        inner.id
        for target in targets
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def _sets_none(node: ast.AST, attribute: str) -> bool:
    """Whether a statement only says that an attribute holds nothing yet."""
    if not isinstance(node, ast.Assign):
        return False
    set_to = [v for t, v in pairs(node) if isinstance(t, ast.Attribute) and t.attr == attribute]
    return bool(set_to) and all(is_constant(value, None) for value in set_to)


def self_targets(node: ast.AST) -> set[str]:
    """The attributes of self that a statement sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    inner = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Attribute)]
    return {n.attr for n in inner if isinstance(n.value, ast.Name) and n.value.id == "self"}


def has_move(node: ast.AST) -> bool:
    """Whether an expression moves something to a device."""
    return any(is_move(inner) for inner in ast.walk(node))


def has_move_of(node: ast.AST, moved: str) -> bool:
    """Whether an expression moves the very thing that is written so."""
    return any(
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr in MOVES
        and ast.unparse(n.func.value) == moved
        for n in ast.walk(node)
    )


def is_move(node: ast.AST | None) -> TypeGuard[ast.Call]:
    """Whether an expression is a call that moves to a device."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TO_DEVICE
    )


def moved_in_place(scope: ast.AST) -> list[ast.Assign]:
    """The statements of a scope that move something and keep it where it was: `self.a = self.a.to(d)`."""
    return [
        s
        for s in own_statements(scope)
        if isinstance(s, ast.Assign)
        and len(s.targets) == 1
        and is_move(s.value)
        and isinstance(s.value.func, ast.Attribute)
        and ast.unparse(s.value.func.value) == ast.unparse(s.targets[0])
    ]


def goes_to_host(call: ast.Call) -> bool:
    """Whether a call says by itself that it moves to the host; a variable says nothing."""
    given = [*call.args, *(k.value for k in call.keywords)]
    named = any(isinstance(n, ast.Constant) and n.value == "cpu" for g in given for n in ast.walk(g))
    called = called_name(call)
    return called == "cpu" or (called == "to" and named)


def chooses_device(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether an expression is a call that says where its result is to be."""
    return is_move(node) or (isinstance(node, ast.Call) and keyword(node, "device") is not None)


def root(node: ast.expr) -> str:
    """The variable at the bottom of a chain of attributes, indices and method calls; empty when there is none."""
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            return ""
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _header_end(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return max(node.lineno, int(body[0].lineno) - 1)
    return node.end_lineno or node.lineno


def header(node: ast.stmt | None) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements inside it."""
    stack: list[ast.AST] = [node] if node is not None else []
    while stack:
        current = stack.pop()
        yield current
        stack.extend(child for child in ast.iter_child_nodes(current) if not isinstance(child, ast.stmt))
