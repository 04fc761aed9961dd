"""Rules about the device that a function is given: its caller names another one, or it never asks for one."""

from __future__ import annotations

import ast

from torch import nn

from trimtab.diagnose import holders, mend, rewrite, source, trace
from trimtab.diagnose.finding import Edit
from trimtab.diagnose.rules_common import Verdict, met
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
    for method in owner.body if owner is not None else ():
        if not isinstance(method, source.Function) or method.name != "__init__":
            continue
        for statement in source.own_statements(method):
            if not isinstance(statement, ast.Assign):
                continue
            for target, value in source.pairs(statement):
                if (
                    isinstance(target, ast.Attribute)
                    and target.attr == attribute
                    and isinstance(value, ast.Name)
                ):
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
