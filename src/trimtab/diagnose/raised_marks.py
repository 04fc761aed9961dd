"""Marks of positions to skip (-100, -1) that are taken for the number of a row: in gather, one_hot, plain indexing.

The labels are right as they are, for a loss that skips them; the line to change is the one that indexes by them. Speaks
only where all that is out of range is one negative number, and computes nothing but that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from trimtab.diagnose import rewrite, source, trace
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual.tensor import payload_of

_USUAL = -100
"""What the losses of torch skip unless they are told otherwise."""
_TAKES: dict[str, tuple[str, int]] = {
    "gather": ("index", 2),
    "take_along_dim": ("indices", 1),
    "scatter": ("index", 2),
    "scatter_": ("index", 2),
    "index_select": ("index", 2),
    "one_hot": ("input", 0),
}
"""The argument of a call that holds row numbers: its name, and its place where the call is a function of torch's."""
_COMPARES = frozenset(("ne", "eq", "ge", "gt", "lt", "le"))


def used_as_rows(file: str, line: int, name: str, tensor: torch.Tensor, size: int) -> Verdict | None:
    """The line that indexes by labels some of which are marked: such positions take row 0, and are masked later."""
    values = payload_of(tensor)
    outside = values[(values < 0) | (values >= size)].unique().tolist()
    statement = source.statement(file, line)
    if len(outside) != 1 or outside[0] >= 0 or statement is None:
        return None
    mark = int(outside[0])
    masked = any(_asks_for(file, node, mark, name) for node in source.walk(file))
    written = any(_writes(node, mark) for node in source.walk(file))
    if mark != _USUAL and not masked and not written:
        return None  # a number that came out too small, perhaps
    uses = [
        node
        for index in _indices(statement)
        for node in ast.walk(index)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name
    ]
    if not uses:
        return None
    code = f"{name}.clamp(min=0)"
    edits = [rewrite.in_place_of(file, node, code) for node in uses]
    shown = rewrite.after_edits(file, statement, edits)
    why = f"{name} marks positions to skip with {mark}, and here the mark is taken for the number of a row"
    fix = f"Take any row there, and mask it afterwards ({name} != {mark}): {shown}."
    gathers = [n for n in source.header(statement) if isinstance(n, ast.Call) and _gathers_by(n, name)]
    if not masked and written and len(gathers) == 1:
        text = rewrite.text_of(file, gathers[0]).replace(name, code)
        put = rewrite.in_place_of(file, gathers[0], f"({text} * ({name} >= 0))")
        fix = f"Take any row there, and count it as 0: {rewrite.after_edits(file, statement, [put])}."
        return Verdict(source.cause(file, line, why), fix, edits=[put])
    # Where nothing masks these positions, row 0 would count: what to write there is for the program to say.
    return Verdict(source.cause(file, line, why), fix, edits=edits if masked else [])


def _indices(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement that are used as row numbers."""
    for node in source.header(statement):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Compare):
            yield node.slice
        elif isinstance(node, ast.Call) and source.called_name(node) in _TAKES:
            word, at = _TAKES[source.called_name(node)]
            # The method of a tensor has one argument less: the tensor stands before the dot.
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            function = owner in ("", "torch", "F", "nn.functional", "torch.nn.functional")
            at = at if function else at - 1
            given = source.keyword(node, word) or (node.args[at] if 0 <= at < len(node.args) else None)
            if given is not None:
                yield given


def _writes(node: ast.AST, mark: int) -> bool:
    """Whether the program puts the mark among numbers itself: `idx[far] = -1`, `masked_fill(far, -1)`."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Subscript) and ast.unparse(node.value) == str(mark)
    fills = ("masked_fill", "masked_fill_", "full", "full_like", "fill_", "where", "pad", "pad_sequence")
    given = [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
    return (
        isinstance(node, ast.Call)
        and source.called_name(node) in fills
        and str(mark) in map(ast.unparse, given)
    )


def _gathers_by(call: ast.Call, name: str) -> bool:
    """Whether a call gives one value for each of the numbers under a name, in their shape."""
    given = [*call.args, *(k.value for k in call.keywords)]
    return source.called_name(call) in ("gather", "take_along_dim") and name in map(ast.unparse, given)


def _asks_for(file: str, node: ast.AST, mark: int, name: str) -> bool:
    """Whether an expression asks which values are the mark: `labels != -100`, `labels.ne(IGNORE)`, `labels >= 0`."""
    if isinstance(node, ast.Compare):
        given = [node.left, *node.comparators]
        below = isinstance(node.ops[0], ast.GtE | ast.Lt)
    elif isinstance(node, ast.Call) and source.called_name(node) in _COMPARES:
        given = list(node.args)
        below = source.called_name(node) in ("ge", "lt")
    else:
        return False
    numbers = [ast.unparse(trace.decided(file, one.lineno, one)[1]) for one in given]
    # Other numbers than the usual one are asked for in many places: `if local_rank != -1`.
    same = name in {ast.unparse(inner) for inner in ast.walk(node) if isinstance(inner, ast.expr)}
    return (str(mark) in numbers and (same or mark == _USUAL)) or (below and same and "0" in numbers)
