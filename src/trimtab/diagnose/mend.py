"""Writes the fix of a placement fault as code that runs in its place, with the program's own names. Applies none.

A fix is made where a tensor is made or bound if a device is at hand there, else where it is used, beside its partner.
What can be written neither way stays a sentence.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from trimtab.diagnose import devices, handed, holders, rewrite, source, spot
from trimtab.diagnose.finding import Cause, Edit
from trimtab.diagnose.rules_common import Verdict, alone, birthplace
from trimtab.diagnose.scene import Scene, Suspect


class Mend(NamedTuple):
    """A fix: the sentence, and the changes that it stands for."""

    text: str
    edits: list[Edit]

    @classmethod
    def by(cls, said: str, *edits: Edit) -> Mend:
        """What to do in words, and the statement as it is afterwards."""
        return cls(f"{said}: {rewrite.shown(list(edits))}", list(edits))

    @classmethod
    def of(cls, said: str, edits: list[Edit]) -> Mend:
        """What to do in words, and every statement that changes."""
        return cls(f"{said}: {rewrite.each_shown(edits)}", edits)

    def blames(self, file: str, line: int, why: str, kind: str = "") -> Verdict:
        """The verdict with this fix; the line to change is the one that the fix changes, if not the guilty one."""
        return Verdict(_changed(self.edits, file, line, why), self.text, kind, self.edits)


def _changed(edits: list[Edit], file: str, line: int, why: str) -> Cause:
    first = min(edits, key=lambda edit: edit.start, default=None)
    statement = source.statement(file, line)
    if first is None or statement is None or first.start == first.end:  # nothing, or a line of its own
        return source.cause(file, line, why)
    last = line if hasattr(statement, "body") else statement.end_lineno or line
    if any(edit.file == file and edit.start[0] <= last and line <= edit.end[0] for edit in edits):
        return source.cause(file, line, why)
    there = f"line {line}" if first.file == file else f"{os.path.basename(file)}:{line}"
    return source.cause(first.file, first.start[0], re.sub("(made|set) here", rf"\1 at {there}", why))


def brought(said: str, file: str, node: ast.expr, device: str) -> Mend:
    """An expression with its result moved to a device."""
    return Mend.by(said, rewrite.in_place_of(file, node, spot.moved(file, node, device)))


def wanted(scene: Scene, stray: Suspect) -> str:
    """The device to which a stray tensor belongs."""
    partner = scene.partner(stray)
    if partner is not None:
        return partner.device
    return f"cuda:{torch.cuda.current_device()}"


def device_at(scene: Scene, stray: Suspect, file: str, line: int) -> str | None:
    """The program's own expression for that device, valid on a line."""
    frames, place = scene.frames, wanted(scene, stray)
    wrong = _explicit(scene, stray, file, line)
    found = devices.device_near(frames, file, line, place, scene.several, wrong)
    found = found or _given_inside(scene, stray, file, line)
    found = found or devices.device_at(frames, file, line, place, scene.several, wrong)
    # NCCL takes what is on the present GPU.
    return found or ('"cuda"' if alone(scene) else None)


def _given_inside(scene: Scene, stray: Suspect, file: str, line: int) -> str | None:
    """In a function that has ended: the device of what it was given when it made the tensor."""
    born, function = birthplace(stray), source.function_at(file, line)
    if function is not None and (made := handed.construction(file, function, scene.frames)) is not None:
        return handed.device_inside(made, file, function, wanted(scene, stray))
    if stray.tensor is None or function is None or born is None or born.file != file:
        return None
    if source.function_at(file, born.line) is not function:
        return None
    hand = handed.received(stray.tensor, stray.device, scene.frames)
    return handed.device_inside(hand, file, function, wanted(scene, stray)) if hand is not None else None


def _explicit(scene: Scene, stray: Suspect, file: str, line: int) -> frozenset[str]:
    """What the line that made a stray tensor says for a device itself: that has led it astray."""
    born, given = stray.born, device_arguments(file, line)
    if born is not None and (born.file, born.line) != (file, line):
        frame = devices.frame_of(scene.frames, file, line)
        given = [
            g for g in given if frame is not None and devices.means(holders.value_of(g, frame), stray.device)
        ]
    return frozenset(ast.unparse(node) for node in given)


def device_arguments(file: str, line: int) -> list[ast.expr]:
    """What the calls on a line are given for a device."""
    found: list[ast.expr] = []
    for call in source.call_on(file, line):
        if (given := source.keyword(call, "device")) is not None:
            found.append(given)
        elif isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda") and call.args:
            found.append(call.args[0])
    return found


def made_there(scene: Scene, stray: Suspect, file: str, line: int) -> Mend | None:
    """The factory calls of a statement with `device=`."""
    statement = source.statement(file, line)
    device = device_at(scene, stray, file, line)
    if statement is None or hasattr(statement, "body") or device is None:
        return None
    if _is_constant(scene, file, line) and device.startswith('"'):
        return None  # no device is chosen yet where a file is imported
    edits = [_with_device(file, call, device) for call in rewrite.factories(statement)]
    if not edits and _explicit(scene, stray, file, line):
        edits = [rewrite.in_place_of(file, device_arguments(file, line)[-1], device)]
    if not edits:
        return None
    return Mend.by(f"make it on {'the GPU' if alone(scene) else 'its device'}", *edits)


def _is_constant(scene: Scene, file: str, line: int) -> bool:
    """Whether a line gives a module a value that a function uses."""
    inside = scene.frames and scene.frames[0].f_code.co_name != "<module>"
    return bool(inside) and source.function_at(file, line) is None


def _with_device(file: str, call: ast.Call, device: str) -> Edit:
    """A factory call with `device=`; where its result is moved in the same expression, that move with another goal."""
    for outer in source.above(file, call):
        if isinstance(outer, ast.stmt):
            break
        if not isinstance(outer, ast.Call) or not isinstance(outer.func, ast.Attribute) or not outer.args:
            continue
        if outer.func.attr == "to" and any(inner is call for inner in ast.walk(outer.func.value)):
            return rewrite.in_place_of(file, outer.args[0], device)
    return rewrite.in_place_of(file, call, rewrite.with_keyword(file, call, "device", device))


def bound_there(scene: Scene, stray: Suspect, file: str, line: int) -> Mend | None:
    """The value that a statement binds, brought to the device."""
    statement = source.statement(file, line)
    device = device_at(scene, stray, file, line)
    if device is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return None
    if _is_constant(scene, file, line) and device.startswith('"'):
        return None
    if any((frame.f_code.co_filename, frame.f_lineno) == (file, line) for frame in scene.frames[:1]):
        return None  # what the failing line binds is not there yet
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    value = statement.value
    if value is None or isinstance(target, ast.Tuple) or isinstance(value, _MANY):
        return None
    if isinstance(value, ast.IfExp) and stray.made_by is not None and stray.made_by[1] in ast.walk(value):
        value = stray.made_by[1]  # the other choice may be no tensor
    return brought("bring it to its device", file, value, device)


_MANY = ast.List | ast.Tuple | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.GeneratorExp


def at_use(scene: Scene, stray: Suspect) -> Mend | None:
    """The stray tensor brought to its partner in the very expression that fails."""
    if not scene.frames or stray.tensor is None or (stray.is_parameter and not is_written(scene, stray)):
        return None
    frame = scene.frames[0]
    file, line = frame.f_code.co_filename, frame.f_lineno
    statement = source.statement(file, line)
    if statement is None:
        return None
    if isinstance(statement, ast.AugAssign) and spot.running(frame) is None:
        return _to_target(scene, stray, statement.target, statement.value)
    node = spot.expression(stray.tensor, stray.device, frame)
    if node is None or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return None
    added_to = isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == ast.unparse(node)
    if added_to or is_written(scene, stray):
        return _to_target(scene, stray, node)
    if edge := _at_the_edge(scene, stray):
        return edge
    home = wanted(scene, stray)
    partner = spot.partner(home, frame, node)
    device = (
        f"{partner}.device" if partner else spot.called_on(home, frame) or device_at(scene, stray, file, line)
    )
    if device is None:
        return None
    beside = spot.beside(node, stray.device, statement, frame)
    edits = [rewrite.in_place_of(file, n, spot.moved(file, n, device)) for n in (node, *beside)]
    return Mend.by(f"bring it to its partner in line {line}", *edits)


def _at_the_edge(scene: Scene, stray: Suspect) -> Mend | None:
    """Where the part of a split model is called that is on the wanted device as a whole: what it is handed."""
    home, edge = wanted(scene, stray), None
    hands = handed.way(stray.tensor, stray.device, scene.frames) if stray.tensor is not None else []
    for frame, outer in itertools.pairwise(scene.frames):
        module = frame.f_locals.get("self")
        lies_on = {str(p.device) for p in module.parameters()} if isinstance(module, nn.Module) else set()
        if lies_on != {home} or stray.device == "cpu":
            break
        edge = outer
    hand = next((h for h in hands if h.frame is edge and h.whole), None)
    device = spot.called_on(home, edge) if edge is not None else None
    if hand is None or edge is None or device is None or hand.node.lineno != edge.f_lineno:
        return None
    return brought(
        f"bring it to this part of the model in line {edge.f_lineno}", hand.file, hand.node, device
    )


def is_sum(frame: FrameType, stray: Suspect) -> bool:
    """Whether the failing statement adds something to the stray tensor in place: that is where it is to be kept."""
    statement = source.statement(frame.f_code.co_filename, frame.f_lineno)
    kept = holders.value_of(statement.target, frame) if isinstance(statement, ast.AugAssign) else None
    return isinstance(kept, torch.Tensor) and stray.tensor is not None and holders.same(kept, stray.tensor)


def received(scene: Scene, stray: Suspect) -> Mend | None:
    """What an ended function gave back, brought to the device by the function of the program that asked for it."""
    tensor = stray.tensor
    hand = handed.received(tensor, stray.device, scene.frames) if tensor is not None else None
    if hand is None or not hand.whole or not isinstance(hand.node, ast.Call) or stray.is_parameter:
        return None
    line = hand.node.lineno
    fails = hand.frame is scene.frames[0] and line == hand.frame.f_lineno
    beside = spot.partner(wanted(scene, stray), hand.frame, hand.node) if fails else None
    device = f"{beside}.device" if beside else device_at(scene, stray, hand.file, line)
    said = "bring it to its partner where it is taken"
    return brought(said, hand.file, hand.node, device) if device is not None else None


def is_written(scene: Scene, stray: Suspect) -> bool:
    """Whether the running call changes a tensor (`x.index_put_(…)`): a moved copy would take the change."""
    frame = scene.frames[0] if scene.frames else None
    call = spot.running(frame) if frame is not None else None
    if frame is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    in_place = call.func.attr.endswith("_") and not call.func.attr.endswith("__")
    node = (
        spot.expression(stray.tensor, stray.device, frame) if in_place and stray.tensor is not None else None
    )
    return node is not None and node in ast.walk(call.func.value)


def _to_target(scene: Scene, stray: Suspect, target: ast.expr, value: ast.expr | None = None) -> Mend | None:
    """`total += x`, `mean.lerp_(x, 0.1)`: what is written into a tensor goes to where that is kept."""
    frame, partner = scene.frames[0], scene.partner(stray)
    if value is None and partner is not None and partner.tensor is not None:
        value = spot.expression(partner.tensor, partner.device, frame)
    said = f"bring what is written there to where it is kept, in line {frame.f_lineno}"
    device = f"{ast.unparse(target)}.device"
    return brought(said, frame.f_code.co_filename, value, device) if value is not None else None


def sentence(scene: Scene, stray: Suspect, line: int) -> Mend:
    """What to do where no code can be written for certain."""
    partner = scene.partner(stray)
    device = scene.expression_of(partner)
    where = f"{device}.device" if device else f'"{wanted(scene, stray)}"'
    name = scene.expression_of(stray)
    return Mend(f"bring {name or f'what line {line} makes'} to its partner: .to({where})", [])


def best(scene: Scene, stray: Suspect, file: str, line: int, bound: bool = True) -> Mend:
    """The first of these that can be written: where it is made, bound, taken from its maker, used."""
    return (
        made_there(scene, stray, file, line)
        or (bound_there(scene, stray, file, line) if bound else None)
        or received(scene, stray)
        or at_use(scene, stray)
        or sentence(scene, stray, line)
    )


def other_goal(scene: Scene, stray: Suspect) -> Mend | None:
    """The move to another GPU, made to the one where the rest is; what goes to the host for a while is brought back."""
    ours = move_call(stray)
    if ours is None or stray.device == "cpu":
        return None
    file, call = ours
    device = device_at(scene, stray, file, call.lineno) or f'"{wanted(scene, stray)}"'
    return Mend.by("move it there", to_device(file, call, device))


def to_device(file: str, call: ast.Call, device: str) -> Edit:
    """A move with another goal; what else it is given stays."""
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "to" and call.args:
        return rewrite.in_place_of(file, call.args[0], device)
    return rewrite.in_place_of(file, call, f"{rewrite.text_of(file, call.func.value)}.to({device})")


def move_call(suspect: Suspect) -> tuple[str, ast.Call] | None:
    """The call that last moved a tensor."""
    if suspect.moved_by is None:
        return None
    file, node = suspect.moved_by
    moves = (n for n in ast.walk(node) if source.is_move(n) and source.called_name(n) != "mps")
    return next(((file, call) for call in moves), None)


def module_moved(scene: Scene, stray: Suspect, file: str, made: ast.stmt, name: str) -> Mend:
    """A module moved where it is made: `net = Net(…).to(device)`, or on a line of its own once both are there."""
    value = getattr(made, "value", None)
    if (
        isinstance(value, ast.Call)
        and isinstance(made, ast.Assign)
        and not isinstance(made.targets[0], ast.Tuple)
        and not name.endswith("]")
    ):
        device = device_at(scene, stray, file, made.lineno)
        if device is not None:
            return brought("move it too", file, value, device)
    parts = _parts(value) if name.endswith("]") else []
    device = device_at(scene, stray, file, made.lineno) if parts else None
    if device is not None:
        moves = [rewrite.in_place_of(file, part, spot.moved(file, part, device)) for part in parts]
        return Mend.by("move each of them", *moves)
    later = _first_place_with_device(scene, stray, file, made)
    if later is not None:
        statement, device = later
        text = f"{name}.to({device})"
        edits = [rewrite.after(file, statement, text)]
        return Mend(f"move it too, after line {statement.lineno}: {text}", edits)
    return Mend(f'move it too: {name}.to("{wanted(scene, stray)}")', [])


def _parts(value: ast.expr | None) -> list[ast.expr]:
    """What a list, tuple or dict is written of, where all of it are calls: `{"a": make(4), "b": make(4)}`."""
    parts: list[ast.expr] = []
    if isinstance(value, ast.List | ast.Tuple):
        parts = value.elts
    elif isinstance(value, ast.Dict):
        parts = value.values
    elif isinstance(value, ast.ListComp):
        parts = [value.elt]
    elif isinstance(value, ast.DictComp):
        parts = [value.value]
    return parts if all(isinstance(part, ast.Call) for part in parts) else []


def line_after(file: str, statement: ast.stmt) -> int:
    """The line after a statement; its own, where the next one belongs to another function, which knows other names."""
    line = (statement.end_lineno or statement.lineno) + 1
    same = source.function_at(file, line) is source.function_at(file, statement.lineno)
    return line if same else statement.lineno


def _first_place_with_device(
    scene: Scene, stray: Suspect, file: str, made: ast.stmt
) -> tuple[ast.stmt, str] | None:
    """The first statement from `made` on, in the same block, after which a device is at hand."""
    holder = next(source.above(file, made), None)
    for block in (getattr(holder, "body", []), getattr(holder, "orelse", [])):
        if made not in block:
            continue
        for statement in block[block.index(made) :]:
            following = line_after(file, statement)
            if isinstance(statement, ast.Return) or hasattr(statement, "body"):
                return None
            if device := device_at(scene, stray, file, following):
                return statement, device
    return None
