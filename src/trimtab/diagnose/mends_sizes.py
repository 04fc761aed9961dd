"""Writes the fix of numbers that are out of range: a size made larger where it was decided, classes numbered anew.

Reads source, and the length of what the failing frames know, for the program's own words; runs nothing of the program.
"""

from __future__ import annotations

import ast

import torch

from trimtab.diagnose import rewrite, rows, scope, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.raised_common import known_here

_WRAPS = frozenset(("tensor", "as_tensor", "int", "LongTensor", "long"))
"""What makes a label of a value without changing it."""


def wider(
    decided: tuple[Place, ast.expr] | None, size: int, wanted: int, error: BaseException
) -> tuple[Place | None, list[Edit]]:
    """The line that decided a size which is too small by what was seen, and how it is made larger there: at the call
    that left it to a default, a number by another, a count of distinct numbers by the largest, one by one more."""
    if decided is None:
        return None, []
    place, node = decided
    file = place.file
    if (left := _left_out(file, node)) is not None:
        name, call = left
        edit = rewrite.add_keyword(file, call, name, _named_size(error, file, call.lineno, wanted))
        return source.place(file, call.lineno), [edit]
    if isinstance(node, ast.Constant) and node.value == size:
        text = _named_size(error, file, node.lineno, wanted)
        return place, [rewrite.in_place_of(file, node, text)]
    if (counted := _distinct(node)) is not None:
        return place, [rewrite.in_place_of(file, node, counted)]
    if wanted == size + 1 and not isinstance(node, ast.Constant):
        return place, [rewrite.in_place_of(file, node, f"{rewrite.operand(node)} + 1")]
    return place, []


def _left_out(file: str, node: ast.expr) -> tuple[str, ast.Call] | None:
    """Of a parameter's default: the parameter, and the only call that leaves it to that."""
    function = source.function_at(file, node.lineno)
    arguments = function.args if function is not None else None
    if function is None or arguments is None or node not in arguments.defaults:
        return None
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    name = names[len(names) - len(arguments.defaults) + arguments.defaults.index(node)]
    owner = source.class_at(file, function.lineno) if function.name == "__init__" else None
    calls = source.calls(file, owner.name if owner is not None else function.name)
    outside = [c for c in calls if source.function_at(file, c.lineno) is not function]
    return (name, outside[0]) if len(outside) == 1 else None


def _named_size(error: BaseException, file: str, line: int, wanted: int) -> str:
    """`len(NAMES)` of the only collection of names that is so large and known on a line; else the number."""
    found = {
        name
        for frame, name, value in known_here(
            error, lambda v: isinstance(v, list | tuple | dict | set | frozenset)
        )
        if len(value) == wanted and all(isinstance(entry, str) for entry in value)
        if frame.f_code.co_filename == file and scope.is_bound(file, line, name)
    }
    return f"len({found.pop()})" if len(found) == 1 else str(wanted)


def _distinct(node: ast.expr) -> str | None:
    """For a count of distinct numbers (`len(set(x))`, `x.nunique()`): one more than the largest of them."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[ast.Call(func=ast.Name(id="set"), args=[given])]):
            return f"max({ast.unparse(given)}) + 1"
        case ast.Call(func=ast.Attribute(value=given, attr="nunique"), args=[]):
            return f"{rewrite.operand(given)}.max() + 1"
        case ast.Call(
            func=ast.Name(id="len"), args=[ast.Call(func=ast.Attribute(value=of, attr="unique"), args=args)]
        ):
            given = args[0] if args else of
            return f"int({rewrite.operand(given)}.max()) + 1"
    return None


def is_count(node: ast.expr) -> bool:
    """Whether a size is the length of something that the program knows."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "len"


def classes_numbered(error: BaseException, made: Place) -> list[Edit]:
    """A row's label looked up in a table that its data set makes once of all its labels, in their order."""
    node, owner = rows.label_value(made), source.class_at(made.file, made.line)
    while isinstance(node, ast.Call) and source.called_name(node) in _WRAPS and node.args:
        node = node.args[0]
    if owner is None or not isinstance(node, ast.Subscript | ast.Attribute):
        return []
    held, each = _labels_of_all(made, node)
    line = source.attribute_assignment(made.file, owner.name, held) if held else None
    kept = source.statement(made.file, line) if line is not None else None
    data = next((d for d in rows.data_sets(error) if type(d).__name__ == owner.name), None)
    if (
        kept is None
        or "self.index" in ast.unparse(owner)
        or isinstance(getattr(data, held, None), torch.Tensor)
    ):
        return []
    table = f"self.index = {{label: i for i, label in enumerate(sorted({each}))}}"
    looked_up = rewrite.in_place_of(made.file, node, f"self.index[{rewrite.text_of(made.file, node)}]")
    return [looked_up, rewrite.after(made.file, kept, table)]


def _labels_of_all(made: Place, node: ast.Subscript | ast.Attribute) -> tuple[str, str]:
    """The attribute of a data set that holds its rows, and the set of all their labels, as code."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("self."):
        held = ast.unparse(node.value).removeprefix("self.")
        return (held, f"set(self.{held})") if held.isidentifier() else ("", "")
    row = source.root(node)
    taken = source.last_assignment(made.file, made.line, row)
    value = taken.value if isinstance(taken, ast.Assign) and isinstance(taken.targets[0], ast.Name) else None
    if not isinstance(value, ast.Subscript) or not ast.unparse(value.value).startswith("self."):
        return "", ""
    held = ast.unparse(value.value).removeprefix("self.")
    return (held, f"{{{ast.unparse(node)} for {row} in self.{held}}}") if held.isidentifier() else ("", "")


def is_shared(place: Place, node: ast.expr) -> bool:
    """Whether the setting that gives a size is read elsewhere in the file too: by what makes the rows, say."""
    key = _last_key(node)
    if not key:
        return False
    reads = [n for n in source.walk(place.file) if isinstance(n, ast.Attribute | ast.Subscript | ast.Name)]
    return sum(isinstance(n.ctx, ast.Load) and n is not node and _last_key(n) == key for n in reads) > 0


def _last_key(node: ast.expr) -> str:
    """`max_len` of cfg["max_len"], cfg.max_len and MAX_LEN as it stands."""
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return key if isinstance(key, str) else ""
    return source.last_name(node)


def more(place: Place, node: ast.expr, number: int) -> Edit:
    """What a layer is given for a size, and so many more."""
    return rewrite.in_place_of(place.file, node, f"{rewrite.operand(node)} + {number}")


def counted_from_one(made: Place, chosen: bool) -> tuple[Place, Edit] | None:
    """The only expression of a file that numbers things from 1: a table over `enumerate(names, 1)` that the line which
    makes the numbers reads, or, where they are chosen and no row's own, `random.randint(1, n)` and torch's."""
    file, found = made.file, list[tuple[ast.Call, str]]()
    read = {source.last_name(n) for n in source.header(source.statement(file, made.line))}
    for call in source.calls(file, "randint", "enumerate"):
        first, second = (*call.args, None, None)[:2]
        if ast.unparse(call.func) == "random.randint" and _is_one(first) and second is not None and chosen:
            found.append((call, f"random.randint(0, {rewrite.operand(second)} - 1)"))
        elif ast.unparse(call.func) == "torch.randint" and _is_one(first) and call.lineno == made.line:
            if isinstance(second, ast.BinOp) and isinstance(second.op, ast.Add) and _is_one(second.right):
                rest = [ast.unparse(given) for given in (*call.args[2:], *call.keywords)]
                found.append((call, f"torch.randint({', '.join(['0', ast.unparse(second.left), *rest])})"))
        elif source.called_name(call) == "enumerate" and first is not None:
            kept = source.statement_of(file, call)
            names = source.bound(kept) | (
                source.self_targets(kept) if isinstance(kept, ast.Assign) else set()
            )
            if _is_one(source.keyword(call, "start") or second) and names & read:
                found.append((call, f"enumerate({ast.unparse(first)})"))
    if len(found) != 1:
        return None
    call, text = found[0]
    return source.place(file, call.lineno), rewrite.in_place_of(file, call, text)


def _is_one(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and node.value is not True
