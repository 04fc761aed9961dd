"""Statements that change nothing though they are written to: a result that is dropped, a method that is not called.

Looks only at statements that a running line shows to be run: those of the blocks around it, and of loops and `with`
blocks in these; never at what hangs on a condition. Reads source, runs nothing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch

from trimtab.diagnose import flow, holders, rewrite, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.virtual.wording import words

_UNCALLED = frozenset(
    ("step", "zero_grad", "backward", "train", "eval", "update", "requires_grad_", "barrier")
)
_CASTS = frozenset(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"))
_CHANGED = words(
    """
    clamp clip masked_fill mul add sub div addcmul addcdiv lerp scatter renorm scatter_add index_fill index_copy
    index_add masked_scatter squeeze unsqueeze transpose permute view reshape detach relu tanh abs neg half float double
    long bfloat16 normalize
    """
)
"""Methods of tensors that give a changed tensor, called for it and nothing else."""
_TENSORS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break


class Dead(NamedTuple):
    """A statement without effect."""

    place: Place
    message: str
    why: str
    fix: str
    edits: list[Edit]


def _dead(file: str, node: ast.stmt | ast.expr, code: str, message: str, why: str, how: str) -> Dead:
    """A statement without effect, and the code that has one in its place."""
    edits = [rewrite.in_place_of(file, node, code)]
    return Dead(source.place(file, node.lineno), message, why, f"{how}: {code}.", edits)


def around(frame: FrameType) -> Iterator[Dead]:
    """The dead statements among those that run together with a frame's present line."""
    file = frame.f_code.co_filename
    here = source.statement(file, frame.f_lineno)
    if here is None:
        return
    chain = [here, *(n for n in source.above(file, here) if isinstance(n, ast.stmt | ast.Module))]
    scope: ast.AST | None = source.function_at(file, frame.f_lineno) or source.tree(file)
    for node in chain:
        for block in _blocks(node):
            if node is here or any(inner in block for inner in chain):
                yield from _in_block(file, block, frame)
        if node is scope:
            return


def inside(file: str, line: int) -> Iterator[Dead]:
    """The dead statements of a function that has run."""
    function = source.function_at(file, line)
    if function is not None:
        yield from _in_block(file, function.body, None)


def uncalled(file: str, name: str) -> bool:
    """Whether a file names a method of this name as a statement, without calling it."""
    named = (n.value for n in source.walk(file) if isinstance(n, ast.Expr))
    return any(isinstance(value, ast.Attribute) and value.attr == name for value in named)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    return [
        block
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, name, None), list)
    ]


def _in_block(
    file: str, block: list[ast.stmt], frame: FrameType | None, loops: tuple[ast.For, ...] = ()
) -> Iterator[Dead]:
    for n, node in enumerate(block):
        if isinstance(node, ast.For):
            yield from _in_block(file, node.body, frame, (*loops, node))
        elif isinstance(node, ast.With):
            yield from _in_block(file, node.body, frame, loops)
        elif isinstance(node, ast.Expr):
            found = _statement(file, node, frame, loops)
            if found is not None:
                yield found
        elif isinstance(node, ast.Assign) and loops and len(node.targets) == 1:
            found = _rebound(file, node, block[n + 1 :], loops)
            if found is not None:
                yield found
        elif isinstance(node, _LEAVES):
            return


def _statement(file: str, node: ast.Expr, frame: FrameType | None, loops: tuple[ast.For, ...]) -> Dead | None:
    value = node.value
    text = ast.unparse(value)
    if isinstance(value, ast.Attribute) and value.attr in _UNCALLED and _is_method(value, frame):
        message = f"{text} is named here and not called: nothing happens."
        return _dead(file, value, f"{text}()", message, "a method without brackets is not called", "Call it")
    if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], ast.Eq):
        if not isinstance(value.left, ast.Attribute | ast.Subscript | ast.Name):
            return None
        code = f"{ast.unparse(value.left)} = {ast.unparse(value.comparators[0])}"
        why = "== compares, and nobody reads the answer"
        return _dead(file, value, code, f"{text} is compared here and not set.", why, "Set it")
    return _dropped(file, node, value, frame, loops) if isinstance(value, ast.Call) else None


def _dropped(
    file: str, node: ast.Expr, call: ast.Call, frame: FrameType | None, loops: tuple[ast.For, ...]
) -> Dead | None:
    """A changed tensor that nobody keeps: `p.data.clamp(-c, c)`, `torch.clamp(x, 0)`, `scores.masked_fill(mask, v)`."""
    name = source.called_name(call)
    if (
        name not in _CHANGED
        or not isinstance(call.func, ast.Attribute)
        or any(k.arg == "out" for k in call.keywords)
    ):
        return None
    function = ast.unparse(call.func.value) in ("torch", "F", "nn.functional", "torch.nn.functional")
    changed = call.func.value if not function else next(iter(call.args), None)
    if changed is None or not _is_tensor(changed, frame, loops):
        return None
    text, arguments = ast.unparse(changed), call.args[function:]
    given = ", ".join([*map(ast.unparse, arguments), *(ast.unparse(k) for k in call.keywords)])
    owned = source.root(changed) in {n for loop in loops for n in source.bound(loop)} or text.endswith(
        ".data"
    )
    if owned and hasattr(torch.Tensor, f"{name}_"):
        data = "" if text.endswith(".data") or flow.switch_around(file, node.lineno) else ".data"
        code = f"{text}{data}.{name}_({given})"
    elif isinstance(changed, ast.Name | ast.Attribute) and not owned:
        code = f"{text} = {ast.unparse(call)}"
    else:
        return None
    message = f"{ast.unparse(call)} gives a new tensor, which nobody keeps: {text} stays as it was."
    why = f"{name} does not change the tensor that it is called on"
    return _dead(file, node, code, message, why, "Keep the result")


def _is_method(node: ast.Attribute, frame: FrameType | None) -> bool:
    """Whether a name stands for a function: a property does something when it is only named."""
    if frame is None:
        return True
    found = inspect.getattr_static(holders.value_of(node.value, frame), node.attr, None)
    return found is not None and not isinstance(found, property)


def _is_tensor(node: ast.expr, frame: FrameType | None, loops: tuple[ast.For, ...]) -> bool:
    while isinstance(node, ast.Attribute) and node.attr in ("data", "grad"):
        node = node.value
    if isinstance(node, ast.Name) and any(node.id in source.bound(loop) for loop in loops):
        return any(node.id in source.bound(loop) and _over_tensors(loop) for loop in loops)
    return frame is not None and isinstance(holders.value_of(node, frame), torch.Tensor)


def _over_tensors(loop: ast.For) -> bool:
    """Whether a loop goes over the tensors of a model or an optimizer."""
    named = {source.called_name(n) for n in ast.walk(loop.iter) if isinstance(n, ast.Call)} & set(_TENSORS)
    groups = (n for n in ast.walk(loop.iter) if isinstance(n, ast.Constant))
    return bool(named) or any(n.value == "params" for n in groups)


def _held_by(loop: ast.For) -> set[str]:
    """The variables of a loop that stand for tensors: not the name, key or number that stands before one."""
    text = ast.unparse(loop.iter)
    if not any(word in text for word in ("named_", ".items()", "enumerate(")):
        return source.bound(loop)
    pairs = [n for n in ast.walk(loop.target) if isinstance(n, ast.Tuple)]
    inner = [n for n in pairs if not any(isinstance(part, ast.Tuple) for part in n.elts)]
    return source.bound(loop) - {n.elts[0].id for n in inner if isinstance(n.elts[0], ast.Name)}


def _rebound(file: str, node: ast.Assign, rest: list[ast.stmt], loops: tuple[ast.For, ...]) -> Dead | None:
    """A new value bound to the variable of a loop over tensors, which nobody reads before the next round."""
    target = node.targets[0]
    mine = [loop for loop in loops if isinstance(target, ast.Name) and target.id in _held_by(loop)]
    if not mine or not isinstance(target, ast.Name) or not _over_tensors(mine[-1]):
        return None
    later = [n for one in (*rest, *mine[-1].orelse) for n in ast.walk(one)]
    later += [n for loop in loops for one in loop.body if one.lineno > node.lineno for n in ast.walk(one)]
    # What an inner loop reads before it binds the variable, its next round reads from there.
    inner = loops[loops.index(mine[-1]) + 1 :]
    later += [n for loop in inner for one in loop.body if one.lineno < node.lineno for n in ast.walk(one)]
    later += list(ast.walk(node.value)) if inner else []
    if any(isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load) for n in later):
        return None
    value, name = node.value, target.id
    if not isinstance(value, ast.BinOp | ast.Call | ast.Name | ast.Attribute | ast.Subscript):
        return None
    text = ast.unparse(value)
    cast = isinstance(value, ast.Call) and source.called_name(value) in _CASTS
    data = "" if flow.switch_around(file, node.lineno) else ".data"
    code = f"{name}.data = {text}" if cast else f"{name}{data}.copy_({text})"
    message = f"The loop binds its variable {name} to a new value and writes nothing into the tensor: it has no effect."
    why = f"{name} = … gives the name to another tensor, and the model's own stays as it was"
    return _dead(file, node, code, message, why, "Write into the tensor")
