"""Whether ranks may come to different answers: from a condition back to what each rank computes for itself.

Reads source only, as far as a function (of `self`, a class) goes; what a call gives counts as a rank's own unless it is
known to be the same everywhere, or the ranks exchanged something since.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from trimtab.diagnose import source

RANK = re.compile(r"(?:^|[_.\W])(?:rank|main|master|primary|chief|leader|zero)(?:$|[_.\W])", re.IGNORECASE)
_SAME_EVERYWHERE = (
    {"len", "int", "float", "min", "max", "abs", "isinstance", "range", "bool", "hasattr", "getattr", "next"}
    | {"parse_args", "parse_known_args", "safe_load", "load", "get", "enumerate", "zip", "sum", "iter"}
    | {"get_world_size"}
)
TOGETHER = {"all_reduce", "broadcast", "all_gather", "reduce", "gather", "broadcast_object_list"}
TOGETHER |= {"reduce_mean", "all_gather_object", "gather_for_metrics", "all_gather_into_tensor"}
TOGETHER |= {"reduce_tensor"}
_DEPTH = 4


def decided_alone(file: str, node: ast.If | ast.While) -> bool:
    """Whether a condition hangs on what each rank computed for itself."""
    return _own(file, node.lineno, node.test, _DEPTH)


def of_rank(file: str, line: int, node: ast.expr, words: re.Pattern[str] = RANK) -> bool:
    """Whether an expression asks which rank this is: in so many words, or by a name that such words were given to."""
    if words.search(ast.unparse(node)):
        return True
    for name in source.names_in(node):
        made = source.last_assignment(file, line, name)
        value = source.value_for(made, name) if made is not None else None
        # What a call makes of the rank (a path, a tensor) is something else.
        said = ast.unparse(value) if value is not None and not isinstance(value, ast.Call) else ""
        if isinstance(value, ast.Call):
            said = f"{ast.unparse(value.func)}("
            if source.called_name(value) == "int":
                said = ast.unparse(value)
        if words.search(said):
            return True
    return False


def _own(file: str, line: int, node: ast.expr, depth: int) -> bool:
    if _computes(node):
        return True
    return depth > 0 and any(_was_computed(file, line, text, depth) for text in _read(node))


def _computes(node: ast.expr) -> bool:
    """Whether an expression calls something that may answer otherwise on another rank."""
    names = [source.called_name(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    # What is made by a class is what its arguments say.
    calls = any(
        name not in _SAME_EVERYWHERE and not name[:1].isupper() for name in names if name not in TOGETHER
    )
    return calls or bool(RANK.search(ast.unparse(node)))


def _read(node: ast.expr) -> set[str]:
    """The names, and attributes of self, that an expression reads."""
    own = {
        ast.unparse(n)
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
    }
    return (source.names_in(node) - {"self"}) | own


def _was_computed(file: str, line: int, text: str, depth: int) -> bool:
    for made in _makers(file, line, text):
        value = getattr(made, "value", None)
        given = source.pairs(made) if isinstance(made, ast.Assign) else ()
        value = next((right for left, right in given if ast.unparse(left) == text), value)
        if not isinstance(value, ast.expr) or _agreed(file, made.lineno, line):
            continue
        names = set() if isinstance(made, ast.Expr) else {text}
        own = _own(file, made.lineno, value, depth - 1) if not names & _read(value) else _computes(value)
        if own or any(_own(file, above.lineno, above.test, depth - 2) for above in _conditions(file, made)):
            return True
    return False


def _makers(file: str, line: int, text: str) -> Iterator[ast.stmt]:
    """The statements that give a name its value, or tell the object that it holds something."""
    scope: ast.AST | None = source.function_at(file, line) or source.tree(file)
    if text.startswith("self."):
        scope = source.class_at(file, line) or scope
    for node in ast.walk(scope) if scope is not None else ():
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(t) == text for one in targets for t in getattr(one, "elts", [one])):
                yield node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            called = ast.unparse(node.value.func)
            if called == text or called.startswith(f"{text}."):
                yield node


def _conditions(file: str, node: ast.stmt) -> list[ast.If]:
    found: list[ast.If] = []
    for above in source.above(file, node):
        if isinstance(above, source.Function):
            break
        if isinstance(above, ast.If):
            found.append(above)
    return found


def _agreed(file: str, made: int, line: int) -> bool:
    """Whether the ranks exchanged something between a value and the line that asks for it."""
    return any(made <= call.lineno <= line for call in source.calls(file, *TOGETHER))
