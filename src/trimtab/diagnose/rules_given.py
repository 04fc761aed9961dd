"""A rule about a device that the program asked for by name: where that name got its value decides where tensors go."""

from __future__ import annotations

import ast

from trimtab.diagnose import mend, rewrite, source
from trimtab.diagnose.rules_common import Verdict
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
    owner = source.class_at(file, function.lineno) if function.name == "__init__" else None
    called = owner.name if owner is not None else function.name
    files = dict.fromkeys([file, *(frame.f_code.co_filename for frame in scene.frames)])
    calls = [(f, call) for f in files for call in source.calls(f, called)]
    if len(calls) != 1:
        return None
    where, call = calls[0]
    names = source.parameters(file, function.body[0].lineno)
    position = names.index(name)
    given = source.keyword(call, name) or (call.args[position] if position < len(call.args) else None)
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
