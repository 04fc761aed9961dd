"""The rule for an optimizer's state that is not where its parameter is: loaded too early, left behind, put there."""

from __future__ import annotations

import ast
import itertools
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch

from trimtab.diagnose import devices, holders, mend, rewrite, rules_modules, scope, source
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import deeds, origin
from trimtab.virtual.origin import Origin

_KIND = "unmoved-state"


class _Slot(NamedTuple):
    """Where an optimizer keeps a tensor."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: Any
    inside: bool = False
    """Whether it lies in an object there: loading moves tensors, dicts and lists of them, and no objects."""


def optimizer_state(scene: Scene, stray: Suspect) -> Verdict | None:
    """State that an optimizer keeps beside its parameters: loaded before the model moved, made before, or put there."""
    tensor = stray.tensor
    if tensor is None or stray.is_parameter:
        return None
    within = itertools.takewhile(lambda f: f != scene.fault.frame, scene.fault.frames)
    in_step = any("/torch/optim/" in f.file.replace("\\", "/") for f in within)
    slot = _slot(tensor)
    place = stray.moved or stray.born
    if place is None or (slot is None and not in_step):
        return None
    if slot is not None:
        line = origin.resolve(deeds.loaded(slot.optimizer))
        moved = origin.moved_of(slot.parameter)
        if slot.inside and (saved := _loaded_elsewhere(scene, stray, place)) is not None:
            return saved
        if line is not None and not _made_in_step(place):
            why = "the optimizer's state is loaded here, while its parameters are on another device than they are now"
            return _move_first(line, why) or _before_loading(scene, slot, line, why)
        if _made_in_step(place) and moved is not None:
            return _left_behind(scene, slot, moved)
        if not _constructs(place):
            return _put_there(scene, stray, slot, place)
    if slot is None and _made_in_step(place):
        return None
    why = "the optimizer's state was put here, and its parameters are (or have moved) elsewhere"
    return _move_first(place, why) or Verdict(source.cause(place.file, place.line, why), _FIRST, _KIND)


_FIRST = "move the model first, then build the optimizer and load its state"


def _slot(tensor: torch.Tensor) -> _Slot | None:
    """The optimizer that keeps a tensor in its state, and for which parameter; looks at what is running."""
    frame: FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            held = (value, *(vars(value).values() if hasattr(value, "__dict__") else ()))
            for optimizer in held if not isinstance(value, type) else ():
                if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in seen:
                    continue
                seen.add(id(optimizer))
                for parameter, slots in optimizer.state.items():
                    for key, entry in slots.items() if isinstance(slots, dict) else ():
                        if entry is tensor:
                            return _Slot(optimizer, parameter, key)
                        if hasattr(entry, "__dict__") and any(v is tensor for v in vars(entry).values()):
                            return _Slot(optimizer, parameter, key, inside=True)
        frame = frame.f_back
    return None


def _loaded_elsewhere(scene: Scene, stray: Suspect, place: Origin) -> Verdict | None:
    """The checkpoint from which the object comes, read to the device of the parameters."""
    loads = [c for c in source.call_on(place.file, place.line) if ast.unparse(c.func) == "torch.load"]
    device = mend.device_at(scene, stray, place.file, place.line)
    if len(loads) != 1 or device is None:
        return None
    why = "the tensors inside the optimizer's own objects are read here, and loading its state does not move them"
    edit = rewrite.add_keyword(place.file, loads[0], "map_location", device)
    return mend.Mend.by("read them to where the parameters are", edit).blames(*place[:2], why, _KIND)


def _made_in_step(place: Origin) -> bool:
    return any(source.called_name(call) == "step" for call in source.call_on(place.file, place.line))


def _constructs(place: Origin) -> bool:
    """Whether a line makes an optimizer: some make their state at once."""
    return any(
        "params" in source.called_name(call) or any("parameters" in ast.unparse(a) for a in call.args)
        for call in source.call_on(place.file, place.line)
    )


def _move_first(line: Origin, why: str) -> Verdict | None:
    """The move that comes too late, in the same function, goes before the line that made the optimizer."""
    statement = source.statement(line.file, line.line)
    roots = [source.root(call.func) for call in source.call_on(line.file, line.line)]
    makers = [source.last_assignment(line.file, line.line + 1, name) for name in roots if name]
    for made in (statement, *makers):
        value = getattr(made, "value", None)
        if made is None or statement is None or not isinstance(value, ast.Call):
            continue
        move = rules_modules.later_move(line.file, statement, value)
        if move is not None:
            code = ast.unparse(move)
            swapped = rules_modules.swapped(line.file, made, move, why)
            text = f"move the model first: put {code} before line {made.lineno}, where the optimizer is made"
            return Verdict(source.cause(line.file, line.line, why), text, _KIND, swapped.edits)
    return None


def _before_loading(scene: Scene, slot: _Slot, line: Origin, why: str) -> Verdict:
    """Loading brings the state to where the parameters are: the move goes before it, or it is loaded once more."""
    _, span = origin.spans_of(slot.parameter)
    move = source.node_at(*span) if span is not None else None
    statement = source.statement(line.file, line.line)
    cause = source.cause(line.file, line.line, why)
    if span is None or not source.is_move(move) or statement is None:
        return Verdict(cause, _FIRST, _KIND)
    code = ast.unparse(move)
    same = span[0] == line.file and source.class_at(span[0], move.lineno) is source.class_at(*line[:2])
    known = same and all(scope.is_bound(line.file, line.line, name) for name in source.names_in(move))
    if known and not hasattr(statement, "body"):
        edits = [rewrite.before(line.file, statement, code)]
        return Verdict(cause, f"move the model before this line: {code}", _KIND, edits)
    again = _load_again(scene, slot, Origin(span[0], move.lineno, ""))
    if again is None:
        return Verdict(cause, f"{_FIRST}: {code} stands in line {move.lineno}, which comes later", _KIND)
    return Verdict(cause, again.text, _KIND, again.edits)


def _load_again(scene: Scene, slot: _Slot, moved: Origin) -> mend.Mend | None:
    """`optimizer.load_state_dict(optimizer.state_dict())` after a move: loading takes the state to its parameters."""
    frame = devices.frame_of(scene.frames, moved.file, moved.line)
    name = holders.expression_for(slot.optimizer, frame) if frame is not None else None
    statement = source.statement(moved.file, moved.line)
    if not name or statement is None or hasattr(statement, "body"):
        return None
    if not scope.is_bound(moved.file, moved.line, name.partition(".")[0]):
        return None
    text = f"{name}.load_state_dict({name}.state_dict())"
    edits = [rewrite.after(moved.file, statement, text)]
    return mend.Mend(f"bring the state along, after line {moved.line}: {text}", edits)


def _left_behind(scene: Scene, slot: _Slot, moved: Origin) -> Verdict:
    """A step has made the state, and then the model was moved."""
    why = "the parameters are moved here, after the optimizer has made its state beside them"
    fix = _load_again(scene, slot, moved)
    text = "move the model before the optimizer is made, or load the optimizer's state again afterwards"
    cause = source.cause(moved.file, moved.line, why)
    return Verdict(cause, fix.text if fix else text, _KIND, fix.edits if fix else [])


def _put_there(scene: Scene, stray: Suspect, slot: _Slot, place: Origin) -> Verdict:
    """The program itself put a tensor into the optimizer's state."""
    why = f"this puts a tensor on {stray.device} into the optimizer's state, and its parameter is elsewhere"
    fix = "make it where its parameter is: torch.zeros_like(p), or device=p.device"
    for call in source.call_on(place.file, place.line):
        if isinstance(call.func, ast.Attribute) and source.goes_to_host(call):
            edit = rewrite.in_place_of(place.file, call, ast.unparse(call.func.value))
            return mend.Mend.by("leave it beside its parameter", edit).blames(*place[:2], why, _KIND)
    if (found := _filled_at(scene, slot, place)) is None:
        return Verdict(source.cause(place.file, place.line, why), fix, _KIND)
    file, value, device = found.file, found.value, f"{found.parameter}.device"
    if _all_slots(found):
        each = f"v.to({device}) if torch.is_tensor(v) and v.dim() else v"
        text = f"{{k: {each} for k, v in {rewrite.operand(value)}.items()}}"
        fix_ = mend.Mend.by("bring them to their parameter", rewrite.in_place_of(file, value, text))
        return fix_.blames(file, found.statement.lineno, why, _KIND)
    made = rewrite.factories(value)
    edits = [rewrite.in_place_of(file, c, rewrite.with_keyword(file, c, "device", device)) for c in made]
    brought = mend.brought("bring it to its parameter", file, value, device)
    fix_ = mend.Mend.by("make it where its parameter is", *edits) if made else brought
    return fix_.blames(file, found.statement.lineno, why, _KIND)


class _Filled(NamedTuple):
    """A statement that fills a slot of an optimizer's state."""

    file: str
    statement: ast.Assign
    value: ast.expr
    parameter: str


def _filled_at(scene: Scene, slot: _Slot, place: Origin) -> _Filled | None:
    """The statement that fills a slot: the one that made the tensor, if it does, else the only one there is."""
    files = dict.fromkeys([place.file, *(frame.f_code.co_filename for frame in scene.frames)])
    found: list[_Filled] = []
    for file in files:
        for node in source.walk(file):
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target, value = node.targets[0], node.value
            parameter = _parameter_of(file, target, node.lineno)
            keys = list(zip(value.keys, value.values, strict=True)) if isinstance(value, ast.Dict) else []
            entry = next((v for k, v in keys if _is(k, slot.key)), None)
            if isinstance(target, ast.Subscript) and _is(target.slice, slot.key):
                entry = value
            one = _Filled(file, node, entry or value, parameter or "")
            if parameter is not None and (entry is not None or (_all_slots(one) and not keys)):
                found.append(one)
    here = [one for one in found if (one.file, one.statement.lineno) == (place.file, place.line)]
    return here[0] if here else found[0] if len(found) == 1 else None


def _all_slots(found: _Filled) -> bool:
    """Whether a statement sets all that is kept for a parameter: `optimizer.state[p] = saved`."""
    target = found.statement.targets[0]
    whole = isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute)
    return whole and found.value is found.statement.value


def _is(node: ast.expr | None, key: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value == key


def _parameter_of(file: str, target: ast.expr, line: int) -> str | None:
    """The `p` of `optimizer.state[p]["step"]`, or of `state["step"]` after `state = self.state[p]`."""
    node: ast.expr = target
    while isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Attribute) and node.value.attr == "state":
            return ast.unparse(node.slice)
        node = node.value
    if isinstance(target, ast.Subscript) and isinstance(node, ast.Name):
        made = source.last_assignment(file, line, node.id)
        value = source.value_for(made, node.id) if made is not None else None
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute):
            return ast.unparse(value.slice) if value.value.attr == "state" else None
    return None
