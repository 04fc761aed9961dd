"""Writes the fix of a placement fault as code that runs in its place, with the program's own names. Applies none.

A fix is made where a tensor is made or bound if a device is at hand there, else where it is used, beside its partner.
What can be written neither way stays a sentence.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

import torch
from torch import nn

from trimtab.diagnose import rewrite, scope, source, spot
from trimtab.diagnose.finding import Edit
from trimtab.diagnose.rules_common import alone
from trimtab.diagnose.scene import Scene, Suspect


class Mend(NamedTuple):
    """A fix: the sentence, and the changes that it stands for."""

    text: str
    edits: list[Edit]


def wanted(scene: Scene, stray: Suspect) -> str:
    """The device to which a stray tensor belongs."""
    partner = scene.partner(stray)
    if partner is not None:
        return partner.device
    return f"cuda:{torch.cuda.current_device()}"


def device_at(scene: Scene, stray: Suspect, file: str, line: int) -> str | None:
    """The program's own expression for that device, valid on a line."""
    found = scope.device_at(scene.frames, file, line, wanted(scene, stray), scene.several)
    # NCCL takes what is on the present GPU.
    return found or ('"cuda"' if alone(scene) else None)


def made_there(
    scene: Scene, stray: Suspect, file: str, line: int, node: ast.AST | None = None
) -> Mend | None:
    """The factory calls of a statement (or of one expression in it) with `device=`."""
    statement = source.statement(file, line)
    device = device_at(scene, stray, file, line)
    if statement is None or hasattr(statement, "body") or device is None:
        return None
    edits = [
        rewrite.in_place_of(file, call, rewrite.with_keyword(file, call, "device", device))
        for call in rewrite.factories(node or statement)
    ]
    if not edits:
        return None
    there = "the GPU" if alone(scene) else "its device"
    return Mend(f"make it on {there}: {rewrite.after_edits(file, statement, edits)}", edits)


def bound_there(
    scene: Scene, stray: Suspect, file: str, line: int, value: ast.expr | None = None
) -> Mend | None:
    """The value that a statement binds (or one part of it), brought to the device."""
    statement = source.statement(file, line)
    device = device_at(scene, stray, file, line)
    if device is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    value = value or statement.value
    if value is None or isinstance(target, ast.Tuple) or isinstance(value, _MANY):
        return None
    edits = [rewrite.in_place_of(file, value, spot.moved(file, value, device))]
    return Mend(rewrite.after_edits(file, statement, edits), edits)


_MANY = ast.List | ast.Tuple | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.GeneratorExp


def at_use(scene: Scene, stray: Suspect) -> Mend | None:
    """The stray tensor brought to its partner in the very expression that fails."""
    if not scene.frames or stray.tensor is None or stray.is_parameter:
        return None
    frame = scene.frames[0]
    file, line = frame.f_code.co_filename, frame.f_lineno
    statement = source.statement(file, line)
    if statement is None:
        return None
    if isinstance(statement, ast.AugAssign) and spot.running(frame) is None:
        return _brought_to_target(file, statement)
    node = spot.expression(stray.tensor, stray.device, frame)
    if node is None or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return None
    partner = spot.partner(wanted(scene, stray), frame, node)
    device = f"{partner}.device" if partner else device_at(scene, stray, file, line)
    if device is None:
        return None
    edits = [rewrite.in_place_of(file, node, spot.moved(file, node, device))]
    there = f"in line {line}: "
    if hasattr(statement, "body"):
        return Mend(f"bring it to its partner {there}{spot.moved(file, node, device)}", edits)
    return Mend(f"bring it to its partner {there}{rewrite.after_edits(file, statement, edits)}", edits)


def _brought_to_target(file: str, statement: ast.AugAssign) -> Mend:
    """`total += x`: what is added goes to where the sum is kept."""
    device = f"{ast.unparse(statement.target)}.device"
    edits = [rewrite.in_place_of(file, statement.value, spot.moved(file, statement.value, device))]
    text = rewrite.after_edits(file, statement, edits)
    return Mend(f"bring what is added to where the sum is kept, in line {statement.lineno}: {text}", edits)


def sentence(scene: Scene, stray: Suspect, line: int) -> Mend:
    """What to do where no code can be written for certain."""
    partner = scene.partner(stray)
    device = scene.expression_of(partner)
    where = f"{device}.device" if device else f'"{wanted(scene, stray)}"'
    name = scene.expression_of(stray)
    return Mend(f"bring {name or f'what line {line} makes'} to its partner: .to({where})", [])


def best(
    scene: Scene, stray: Suspect, file: str, line: int, node: ast.AST | None = None, bound: bool = True
) -> Mend:
    """The first of these that can be written: where it is made, where it is bound, where it is used."""
    return (
        made_there(scene, stray, file, line, node)
        or (bound_there(scene, stray, file, line) if bound else None)
        or at_use(scene, stray)
        or sentence(scene, stray, line)
    )


def module_moved(scene: Scene, stray: Suspect, file: str, made: ast.stmt, name: str) -> Mend:
    """A module moved where it is made: `net = Net(…).to(device)`, or on a line of its own once both are there."""
    value = getattr(made, "value", None)
    if (
        isinstance(value, ast.Call)
        and isinstance(made, ast.Assign)
        and not isinstance(made.targets[0], ast.Tuple)
    ):
        device = device_at(scene, stray, file, made.lineno)
        if device is not None:
            edits = [rewrite.in_place_of(file, value, spot.moved(file, value, device))]
            return Mend(f"move it too: {rewrite.after_edits(file, made, edits)}", edits)
    later = _first_place_with_device(scene, stray, file, made)
    if later is not None:
        statement, device = later
        text = f"{name}.to({device})"
        edits = [rewrite.after(file, statement, text)]
        return Mend(f"move it too, after line {statement.lineno}: {text}", edits)
    return Mend(f'move it too: {name}.to("{wanted(scene, stray)}")', [])


def _first_place_with_device(
    scene: Scene, stray: Suspect, file: str, made: ast.stmt
) -> tuple[ast.stmt, str] | None:
    """The first statement from `made` on, in the same block, after which a device is at hand."""
    holder = next(source.above(file, made), None)
    for block in (getattr(holder, "body", []), getattr(holder, "orelse", [])):
        if made not in block:
            continue
        for statement in block[block.index(made) :]:
            following = (statement.end_lineno or statement.lineno) + 1
            if isinstance(statement, ast.Return) or hasattr(statement, "body"):
                return None
            if device := device_at(scene, stray, file, following):
                return statement, device
    return None


def is_movable(value: object) -> bool:
    """Whether a value can be moved by one call."""
    return isinstance(value, torch.Tensor | nn.Module) or callable(getattr(value, "to", None))
