"""How a line that changes a tensor in place is written so that it makes a new one. Reads source, runs nothing."""

from __future__ import annotations

import ast
from typing import Literal

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.mends_graph import Mend

Filled = Literal["mask", "part", ""]
"""Whether a number was written, where a mask of the tensor's own shape says so or into any other part of it."""


def out_of_place(place: Place, filled: Filled = "") -> Mend | None:
    """A line that changes a tensor in place, written so that it makes a new one."""
    node = source.statement(place.file, place.line)
    if isinstance(node, ast.AugAssign):
        target, operator = ast.unparse(node.target), type(node.op)
        if isinstance(node.target, ast.Name | ast.Attribute):
            code = ast.unparse(
                ast.Assign([node.target], ast.BinOp(node.target, operator(), node.value), lineno=0)
            )
            return f"Make a new tensor: {code}.", [rewrite.in_place_of(place.file, node, code)]
        root = source.root(node.target)
        return (
            f"Change a copy, not the tensor that backward needs: {root} = {root}.clone() before {target} is set.",
            [],
        )
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        if filled and (mend := _filled(place, node, node.targets[0], filled)) is not None:
            return mend
        name = ast.unparse(node.targets[0].value)
        # What is read of the same tensor is read from a copy, which later writes leave as it is.
        reads = [
            n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == name
        ]
        edits = [rewrite.in_place_of(place.file, n, f"{ast.unparse(n)}.clone()") for n in reads]
        code = f" ({', '.join(dict.fromkeys(edit.text for edit in edits))})" if edits else ""
        return (
            f"Read from a copy what is computed with{code}, or keep the parts in a list and put them together at the "
            "end (torch.stack, torch.cat).",
            edits,
        )
    for call in source.call_on(place.file, place.line):
        flag = source.keyword(call, "inplace")
        if flag is not None and source.is_constant(flag, True):
            return "Leave inplace=True away: inplace=False.", [rewrite.in_place_of(place.file, flag, "False")]
        if (
            not isinstance(call.func, ast.Attribute)
            or not call.func.attr.endswith("_")
            or call.func.attr[0] == "_"
        ):
            continue
        text = ast.unparse(
            ast.Call(ast.Attribute(call.func.value, call.func.attr[:-1]), call.args, call.keywords)
        )
        alone = (
            isinstance(node, ast.Expr)
            and node.value is call
            and isinstance(call.func.value, ast.Name | ast.Attribute)
        )
        code = f"{ast.unparse(call.func.value)} = {text}" if alone else text
        return f"Make a new tensor: {code}.", [rewrite.in_place_of(place.file, call, code)]
    return None


def _filled(place: Place, node: ast.Assign, target: ast.Subscript, filled: Filled) -> Mend | None:
    """A number that is written into a tensor: by a mask it fills a new one, any other part is written in a copy."""
    whole = target.value
    if len(node.targets) > 1 or not isinstance(whole, ast.Name | ast.Attribute):
        return None
    function, name = source.function_at(place.file, place.line), ast.unparse(whole)
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value] if function else []
    if not returns and name in source.parameters(place.file, place.line):
        return None  # the caller's own tensor is meant to change
    if filled == "mask":
        code = f"{name} = {name}.masked_fill({ast.unparse(target.slice)}, {rewrite.text_of(place.file, node.value)})"
        return f"Make a new tensor: {code}.", [rewrite.in_place_of(place.file, node, code)]
    code = f"{name} = {name}.clone()"
    fix = f"Change a copy, not the tensor that backward needs: {code} before this line."
    return fix, [rewrite.before(place.file, node, code)]
