"""A rule about a device that a call gives by position to another parameter (`dropout`, `bias`): the parameter for the
device is left at its default. Says nothing of a call whose signature it cannot see."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import holders, mend, rewrite, scope, source
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_modules import bindings
from trimtab.diagnose.scene import Scene, Suspect


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
        for file, made_by, _ in bindings(scene, holders.outermost(part.module, scene.modules)):
            value = getattr(made_by, "value", None)
            if isinstance(value, ast.Call):
                yield file, value


def _seen_from(scene: Scene, file: str, line: int) -> FrameType | None:
    """The running function that holds a line; of one that has ended, another that knows the same module's names."""
    others = (frame for frame in scene.frames if frame.f_code.co_filename == file)
    return scope.frame_of(scene.frames, file, line) or next(others, None)


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
    if frame is not scope.frame_of(scene.frames, file, node.lineno):
        local = source.root(node) in source.parameters(file, node.lineno)
        if local or source.assignments(file, node.lineno, source.root(node)):
            # The function has ended, and only the name is left to tell.
            return isinstance(node, ast.Name | ast.Attribute) and scope.sounds_like_device(text)
    value = holders.value_of(node, frame)
    return isinstance(value, str | torch.device) and scope.means(value, home)
