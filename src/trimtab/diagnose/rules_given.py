"""Rules about the device that a call gives: in another parameter's place, another one than its caller's, none at all,
or one that a helper object chooses by itself. Says nothing of a call whose signature it cannot see."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import devices, holders, mend, owners, rewrite, scope, source, trace
from trimtab.diagnose.finding import Edit
from trimtab.diagnose.rewrite import last_move_argument
from trimtab.diagnose.rules_common import Verdict, met
from trimtab.diagnose.rules_modules import bindings
from trimtab.diagnose.scene import Scene, Suspect


def device_given(scene: Scene, stray: Suspect) -> Verdict | None:
    """Made with `device=` or `.to()` of a parameter that its caller gave another device, or left at its default."""
    born = stray.born
    if born is None or stray.is_parameter:
        return None
    for given in mend.device_arguments(born.file, born.line):
        function = source.function_at(born.file, born.line)
        name = given.id if isinstance(given, ast.Name) else ""
        if isinstance(given, ast.Attribute) and ast.unparse(given.value) == "self":
            function, name = _set_from(born.file, born.line, given.attr)
        if function is None or not name or name not in source.parameters(born.file, function.body[0].lineno):
            continue
        if (verdict := _caller(scene, stray, born.file, function, name)) is not None:
            return verdict
    return None


def _set_from(file: str, line: int, attribute: str) -> tuple[source.Function | None, str]:
    """The constructor that keeps a parameter as `self.attribute`, and that parameter."""
    owner = source.class_at(file, line)
    methods = [m for m in (owner.body if owner is not None else ()) if isinstance(m, source.Function)]
    for method in (m for m in methods if m.name == "__init__"):
        set_here = [s for s in source.own_statements(method) if isinstance(s, ast.Assign)]
        for target, value in (pair for s in set_here for pair in source.pairs(s)):
            if source.last_name(target) == attribute and isinstance(value, ast.Name):
                return method, value.id
    return None, ""


def _caller(scene: Scene, stray: Suspect, file: str, function: source.Function, name: str) -> Verdict | None:
    """The only call of a function (or class) in the running files, with the device that it should give."""
    found = _only_call(scene, file, function)
    if found is None:
        return None
    where, call = found
    given = trace.argument(call, function, name)
    device = mend.device_at(scene, stray, where, call.lineno)
    if device is None or (given is not None and ast.unparse(given) == device):
        return None
    why = f"this makes its tensors on {stray.device}, and what they meet is on {mend.wanted(scene, stray)}"
    if given is None:
        edits = [rewrite.in_place_of(where, call, rewrite.with_keyword(where, call, name, device))]
        why = f"{name} is left at its default here: {why}"
    else:
        edits = [rewrite.in_place_of(where, given, device)]
    return mend.Mend.by("give it the device", *edits).blames(where, call.lineno, why)


def _only_call(scene: Scene, file: str, function: source.Function) -> tuple[str, ast.Call] | None:
    """The only call of a function (or of the class whose constructor it is) in the running files."""
    owner = source.class_at(file, function.lineno) if function.name == "__init__" else None
    called = owner.name if owner is not None else function.name
    files = dict.fromkeys([file, *(frame.f_code.co_filename for frame in scene.frames)])
    calls = [(f, call) for f in files for call in source.calls(f, called)]
    return calls[0] if len(calls) == 1 else None


def never_asked(scene: Scene, stray: Suspect) -> Verdict | None:
    """Made by the constructor of a plain object that knows no device, while the only line that makes such an object
    does: the constructor is given the device."""
    born, here = stray.born, scene.frames[0] if scene.frames else None
    if born is None or here is None or stray.device != "cpu" or stray.is_parameter:
        return None
    file, function = born.file, source.function_at(born.file, born.line)
    if function is None or function.name != "__init__" or mend.is_sum(here, stray):
        return None
    keeper = next((k for k in scene.keepers(stray) if not k.container), None)
    if keeper is None or isinstance(keeper.owner, nn.Module) or holders.source_of(keeper.owner) is None:
        return None
    calls, args = _only_call(scene, file, function), function.args
    if calls is None or args.vararg or args.kwonlyargs or args.kwarg or "device" in source.names_in(function):
        return None
    where, call = calls
    device = mend.device_at(scene, stray, where, call.lineno)
    made = rewrite.factories(function)
    if device is None or mend.device_at(scene, stray, file, born.line) or not made:
        return None
    ends = [
        rewrite.end_of(file, args.args[-1]),
        *(rewrite.end_of(file, default) for default in args.defaults),
    ]
    end = max(ends)
    edits = [
        Edit(file, end, end, ", device=None"),
        *(rewrite.in_place_of(file, c, rewrite.with_keyword(file, c, "device", "device")) for c in made),
        rewrite.add_keyword(where, call, "device", device),
    ]
    why = f"{keeper.name} is made here on {stray.device}, whatever the program works on, and {met(scene, stray)}"
    return mend.Mend.of("let it be made on a device that its maker names", edits).blames(file, born.line, why)


def placement_conflict(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch follows a setting, while a helper object (an accelerator, a trainer) moved the model elsewhere."""
    partner = scene.partner(stray)
    if partner is None or not partner.is_parameter or (moved := partner.moved) is None:
        return None
    chosen = last_move_argument(scene, stray)
    if chosen is None or not any(
        word in chosen.lower() for word in ("cfg", "conf", "args", "device", "opt", "setting")
    ):
        return None
    for call in source.call_on(moved.file, moved.line):
        if not isinstance(call.func, ast.Attribute) or call.func.attr in source.MOVES:
            continue
        maker = call.func.value
        made = (
            source.last_assignment(moved.file, moved.line, maker.id) if isinstance(maker, ast.Name) else None
        )
        if made is None or not isinstance(getattr(made, "value", None), ast.Call):
            continue
        why = f"{ast.unparse(maker)} chooses the device by itself ({partner.device}) while batches follow {chosen}"
        fix = f"let it obey the same setting as the batches ({chosen}), or send batches to {ast.unparse(maker)}.device"
        return Verdict(source.cause(moved.file, made.lineno, why), fix, "placement-conflict")
    return None


def wrong_slot(scene: Scene, stray: Suspect) -> Verdict | None:
    """What was made by a call that got the device in another parameter's place."""
    if stray.device != "cpu" or stray.moved is not None:
        return None
    for file, call in _makers(scene, stray):
        if len(call.args) == 0 or any(isinstance(a, ast.Starred) for a in call.args):
            continue
        frame = _seen_from(scene, file, call.lineno)
        called = holders.value_of(call.func, frame) if frame is not None else None
        if frame is None or called is None:
            continue
        slots = _slots(called, call)
        last = call.args[-1]  # what stands behind it would take its place
        name, device = (slots[0].name, slots[1]) if slots is not None else ("", "")
        if slots is None or not _is_device(scene, stray, file, last, slots[0], frame):
            continue
        given = ast.unparse(last)
        why = f"{given} is the value of {name} here, by its position: {device} is left at its default"
        edit = rewrite.in_place_of(file, last, f"{device}={rewrite.text_of(file, last)}")
        return mend.Mend.by("pass it by name", edit).blames(file, call.lineno, why)
    return None


def _makers(scene: Scene, stray: Suspect) -> Iterator[tuple[str, ast.Call]]:
    """The calls that made a stray tensor: on its line, of the function or class around it, of its whole model."""
    born = stray.born
    if born is not None:
        yield from ((born.file, call) for call in source.call_on(born.file, born.line))
        function = source.function_at(born.file, born.line)
        owner = source.class_at(born.file, born.line) if function is not None else None
        name = owner.name if owner is not None else function.name if function is not None else ""
        files = dict.fromkeys([born.file, *(frame.f_code.co_filename for frame in scene.frames)])
        made = [(file, call) for file in files for call in source.calls(file, name)] if name else []
        yield from made if len(made) == 1 else ()
    if (part := stray.registered) is not None:
        for file, made_by, _ in bindings(scene, owners.outermost(part.module, scene.modules)):
            value = getattr(made_by, "value", None)
            if isinstance(value, ast.Call):
                yield file, value


def _seen_from(scene: Scene, file: str, line: int) -> FrameType | None:
    """The running function that holds a line; of one that has ended, another that knows the same module's names."""
    others = (frame for frame in scene.frames if frame.f_code.co_filename == file)
    return devices.frame_of(scene.frames, file, line) or next(others, None)


def _slots(called: Any, call: ast.Call) -> tuple[inspect.Parameter, str] | None:
    """The parameter that takes a call's last positional argument, and the one for the device that gets nothing."""
    if not isinstance(called, type) and not inspect.isfunction(called):
        return None
    try:
        signature = inspect.signature(called)
        bound = signature.bind_partial(*call.args, **{k.arg: k.value for k in call.keywords if k.arg})
    except (TypeError, ValueError):
        return None  # a class without a signature, or a call that it does not take
    takers = [signature.parameters[name] for name, value in bound.arguments.items() if value is call.args[-1]]
    free = [
        p.name
        for p in signature.parameters.values()
        if p.default is not p.empty and scope.sounds_like_device(p.name)
    ]
    whole = not any(k.arg is None for k in call.keywords)
    if len(takers) != 1 or len(free) != 1 or free[0] in bound.arguments or not whole:
        return None
    return None if takers[0].default is takers[0].empty else (takers[0], free[0])


def _is_device(
    scene: Scene, stray: Suspect, file: str, node: ast.expr, slot: inspect.Parameter, frame: FrameType
) -> bool:
    """Whether an argument is the wanted device, in a place that is meant for something else."""
    if scope.sounds_like_device(slot.name) or isinstance(slot.default, str | torch.device):
        return False
    home, text = mend.wanted(scene, stray), ast.unparse(node)
    if frame is not devices.frame_of(scene.frames, file, node.lineno):
        local = source.root(node) in source.parameters(file, node.lineno)
        if local or source.assignments(file, node.lineno, source.root(node)):
            # The function has ended, and only the name is left to tell.
            return isinstance(node, ast.Name | ast.Attribute) and scope.sounds_like_device(text)
    value = holders.value_of(node, frame)
    return isinstance(value, str | torch.device) and devices.means(value, home)
