"""How a line that changes a tensor in place is written so that it makes a new one. Reads source, runs nothing."""

from __future__ import annotations

import ast
from types import FrameType
from typing import Literal

import torch
from torch import nn

from trimtab.diagnose import flow, graphs, holders, mends_layers, owners, rewrite, shared_graph, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.mends_graph import Mend
from trimtab.diagnose.raised_common import own_frames
from trimtab.virtual.state import machine

Filled = Literal["mask", "part", ""]
"""Whether a number was written, where a mask of the tensor's own shape says so or into any other part of it."""


def out_of_place(place: Place, filled: Filled = "") -> Mend | None:
    """A line that changes a tensor in place, written so that it makes a new one."""
    node = source.statement(place.file, place.line)
    if isinstance(node, ast.AugAssign):
        operator = type(node.op)
        if isinstance(node.target, ast.Name | ast.Attribute):
            code = ast.unparse(
                ast.Assign([node.target], ast.BinOp(node.target, operator(), node.value), lineno=0)
            )
            return f"Make a new tensor: {code}.", [rewrite.in_place_of(place.file, node, code)]
        return _on_a_copy(place, node, node.target)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        if filled and (mend := _filled(place, node, node.targets[0], filled)) is not None:
            return mend
        name = ast.unparse(node.targets[0].value)
        # What is read of the same tensor, here or in the same loop, is read from a copy that later writes leave alone.
        loop = flow.loop_at(place)
        inside = [
            n for n in ast.walk(loop or node) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == name
        ]
        reads = [n for n in inside if isinstance(n.ctx, ast.Load)]
        edits = [rewrite.in_place_of(place.file, n, f"{ast.unparse(n)}.clone()") for n in reads]
        if not edits:
            return "Keep the parts in a list, and put them together at the end (torch.stack, torch.cat).", []
        code = ", ".join(f"{edit.text} (line {edit.start[0]})" for edit in edits)
        return f"Read from a copy what is computed with: {code}.", edits
    for call in source.call_on(place.file, place.line):
        if source.is_constant(source.keyword(call, "inplace"), True):
            return _told(place.file, call)
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


def _told(file: str, call: ast.Call) -> Mend:
    edit = rewrite.add_keyword(file, call, "inplace", "False")
    return f"Not in place: {rewrite.with_keyword(file, call, 'inplace', 'False')}.", [edit]


def of_layer(layer: nn.Module) -> tuple[Place, Mend] | None:
    """Where a layer that works in place is made: under the attribute that holds it, else the only one of its kind."""
    kind, here = type(layer).__name__, machine()
    files: dict[str, None] = {}
    for held in owners.climb(layer, here.modules if here is not None else ()):
        named = holders.source_of(held.module)
        if named is None or not source.is_user_file(named[0]):
            continue
        files[named[0]] = None
        found = mends_layers.attribute_set(*named, held.name)
        calls = [n for n in ast.walk(found[1]) if isinstance(n, ast.Call)] if found is not None else []
        if len(made := _of_kind(calls, kind)) == 1:
            return source.place(named[0], made[0].lineno), _told(named[0], made[0])
    for file in files:
        if len(made := _of_kind(source.calls(file, kind), kind)) == 1:
            return source.place(file, made[0].lineno), _told(file, made[0])
    return None


def _of_kind(calls: list[ast.Call], kind: str) -> list[ast.Call]:
    told = (c for c in calls if source.is_constant(source.keyword(c, "inplace"), True))
    return [call for call in told if source.called_name(call) == kind]


def _filled(place: Place, node: ast.Assign, target: ast.Subscript, filled: Filled) -> Mend | None:
    """A number that is written into a tensor: by a mask it fills a new one, any other part is written in a copy."""
    if len(node.targets) > 1 or not isinstance(target.value, ast.Name | ast.Attribute):
        return None
    if filled == "mask" and not _is_callers(place, name := ast.unparse(target.value)):
        code = f"{name} = {name}.masked_fill({ast.unparse(target.slice)}, {rewrite.text_of(place.file, node.value)})"
        return f"Make a new tensor: {code}.", [rewrite.in_place_of(place.file, node, code)]
    return _on_a_copy(place, node, target)


def _on_a_copy(place: Place, node: ast.stmt, target: ast.expr) -> Mend | None:
    """A part of a tensor that is written in a copy of it, made on the line before."""
    whole = target.value if isinstance(target, ast.Subscript) else target
    name = ast.unparse(whole)
    if not isinstance(whole, ast.Name | ast.Attribute) or _is_callers(place, name):
        return None
    code = f"{name} = {name}.clone()"
    fix = f"Change a copy, not the tensor that backward needs: {code} before this line."
    return fix, [rewrite.before(place.file, node, code)]


def _is_callers(place: Place, name: str) -> bool:
    """Whether a function changes a tensor for its caller: it was given it, and returns nothing."""
    function = source.function_at(place.file, place.line)
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value] if function else []
    return not returns and name in source.parameters(place.file, place.line)


def stepped_later(error: BaseException, step: Place) -> Mend | None:
    """A loss that goes backward after a step has changed its weights: its pass and step, put before that step's pass.

    Only where the earlier loss does not go through what the later pass's optimizer changes in turn.
    """
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        block = flow.block_of(file, source.statement(file, step.line))
        steps, failing = (
            [n for n in block if n.lineno <= at <= (n.end_lineno or 0)] for at in (step.line, line)
        )
        if step.file != file or len(steps) != 1 or len(failing) != 1 or steps[0].lineno >= failing[0].lineno:
            return None
        first = next((n for n in reversed(block[: block.index(steps[0])]) if _sends_back(file, n)), None)
        after = block[block.index(failing[0]) + 1 :]
        last = next((n for n in after if any(source.methods_on(file, n.lineno, "step"))), None)
        optimizer = next((o for _, o in source.methods_on(file, step.line, "step")), None)
        later, root = (
            shared_graph.trained_after(frame, line),
            _sent(frame, file, first.lineno) if first else None,
        )
        if first is None or last is None or optimizer is None or later is None or root is None:
            return None
        if later & {id(leaf) for leaf in graphs.leaves(root)}:
            return None
        back = block[block.index(first) : block.index(steps[0]) + 1]
        text = "\n".join([f"{ast.unparse(optimizer)}.zero_grad()", *(rewrite.written(file, n) for n in back)])
        edits = [*(rewrite.without(file, n) for n in back), rewrite.after(file, last, text)]
        loss, lines = shared_graph.loss_name(file, line), f"lines {failing[0].lineno} to {last.lineno}"
        said = f"Send {loss} backward and step ({lines}) first"
        return f"{said}, and put behind line {last.lineno}: {'; '.join(text.splitlines())}.", edits
    return None


def _sends_back(file: str, node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and any(source.methods_on(file, node.lineno, "backward"))


def _sent(frame: FrameType, file: str, line: int) -> torch.Tensor | None:
    """The loss that a line sends backward, where it is a variable of the frame."""
    for call, _ in source.methods_on(file, line, "backward"):
        names = (
            holders.value_of(n, frame) for n in ast.walk(call) if isinstance(n, ast.Name | ast.Attribute)
        )
        return next((value for value in names if isinstance(value, torch.Tensor)), None)
    return None
