"""The rule about a move whose result nobody keeps: on a line of its own, or under a name that is read no more."""

from __future__ import annotations

import ast

import torch

from trimtab.diagnose import mend, rewrite, source
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import origin


def dropped_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """`x.to(device)` whose result nobody kept, or kept only under a name that is read no more."""
    tensors = [stray.tensor, stray.held]
    for sight in scene.sights(stray):
        tensors.append(sight.frame.f_locals.get(sight.name))
    for tensor in tensors:
        span = origin.copied_span(tensor) if isinstance(tensor, torch.Tensor) else None
        call = source.node_at(*span) if span is not None else None
        if span is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr not in source.MOVES:
            continue
        file = span[0]
        statement = source.statement_of(file, call)
        if isinstance(statement, ast.Expr):
            fix = _kept(file, statement, call)
        elif isinstance(statement, ast.Assign) and _is_read_no_more(file, statement, call):
            fix = _stored_back(file, statement, call)
        else:
            continue
        moved = ast.unparse(call.func.value)
        why = f"the moved copy of {moved} is thrown away here: Tensor.to does not work in place"
        return fix.blames(file, statement.lineno, why)
    return None


def _kept(file: str, statement: ast.Expr, call: ast.Call) -> mend.Mend:
    """`x.to(d)` or `[x.to(d) for x in xs]` on a line of its own."""
    assert isinstance(call.func, ast.Attribute)
    text = ast.unparse(statement.value)
    if statement.value is call and isinstance(call.func.value, ast.Name | ast.Attribute | ast.Subscript):
        text = f"{ast.unparse(call.func.value)} = {text}"
        return mend.Mend(f"assign it: {text}", [rewrite.in_place_of(file, statement, text)])
    if isinstance(statement.value, ast.ListComp) and len(statement.value.generators) == 1:
        loop = statement.value.generators[0]
        if again := _again(loop.target, loop.iter, statement.value.elt):
            return mend.Mend(f"keep the result: {again}", [rewrite.in_place_of(file, statement, again)])
    return mend.Mend(f"assign the result of {ast.unparse(call)}", [])


def _again(target: ast.expr, over: ast.expr, value: ast.expr) -> str | None:
    """The container that a loop goes over, made again of moved entries."""
    item, made = ast.unparse(target), ast.unparse(value)
    if isinstance(over, ast.Name | ast.Attribute) and isinstance(target, ast.Name):
        return f"{ast.unparse(over)} = [{made} for {item} in {ast.unparse(over)}]"
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and not over.args:
        owner = ast.unparse(over.func.value)
        if over.func.attr == "values" and isinstance(target, ast.Name):
            key = "key" if item != "key" else "name"
            return f"{owner} = {{{key}: {made} for {key}, {item} in {owner}.items()}}"
        if over.func.attr == "items" and isinstance(target, ast.Tuple):
            names = ast.unparse(target).strip("()")
            return f"{owner} = {{{ast.unparse(target.elts[0])}: {made} for {names} in {owner}.items()}}"
    return None


def _is_read_no_more(file: str, statement: ast.Assign, call: ast.Call) -> bool:
    """Whether the name that got the moved copy is not read afterwards (nor, in a loop, anywhere else in it)."""
    target = statement.targets[0]
    if len(statement.targets) != 1 or not isinstance(target, ast.Name) or statement.value is not call:
        return False
    function = source.function_at(file, statement.lineno)
    if function is None and not any(isinstance(n, ast.For) for n in source.above(file, statement)):
        return False  # a global: another function may read it
    loop = next((n for n in source.above(file, statement) if isinstance(n, ast.For | ast.While)), None)
    own = set(ast.walk(statement))
    for node in ast.walk(source.scope_at(file, statement.lineno)):
        if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load):
            inside = loop is not None and loop.lineno <= node.lineno <= (loop.end_lineno or 0)
            if node not in own and (node.lineno > statement.lineno or inside):
                return False
    return not isinstance(loop, ast.While)


def _stored_back(file: str, statement: ast.Assign, call: ast.Call) -> mend.Mend:
    """`for x in xs: x = x.to(d)`: the container keeps what it had."""
    loop = next((n for n in source.above(file, statement) if isinstance(n, ast.For)), None)
    name = ast.unparse(statement.targets[0])
    if loop is not None and name in source.bound(loop):
        over = loop.iter
        called = over.func if isinstance(over, ast.Call) else None
        over_items = isinstance(called, ast.Attribute) and called.attr == "items"
        if over_items and isinstance(loop.target, ast.Tuple) and isinstance(called, ast.Attribute):
            entry = f"{ast.unparse(called.value)}[{ast.unparse(loop.target.elts[0])}]"
            text = f"{entry} = {ast.unparse(call)}"
            edits = [rewrite.in_place_of(file, statement, text)]
            return mend.Mend(f"store it back: {text}", edits)
        if len(loop.body) == 1 and (again := _again(loop.target, over, call)):
            edits = [rewrite.in_place_of(file, loop, again)]
            return mend.Mend(f"keep the moved ones: {again}", edits)
        return mend.Mend(
            f"store the moved {name} back where the loop takes it from ({ast.unparse(over)})", []
        )
    return mend.Mend(f"give the moved {name} back: return {name}, and assign it where this is called", [])
