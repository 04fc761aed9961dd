"""The rules for two precisions in one operation: which of them was chosen where, and the cast that joins them."""

from __future__ import annotations

import ast

import torch

from trimtab.diagnose import holders, rewrite, source, trace
from trimtab.diagnose.finding import Cause, Edit
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_likely import assignment
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual.origin import Origin


def dtype(scene: Scene) -> Verdict | None:
    """Two precisions in one operation: the weight's origin if it is the wider one, else the input's."""
    parameter = next((s for s in scene.operands if s.is_parameter), None)
    if parameter is None:
        return None
    others = [s for s in scene.operands if not s.is_parameter]
    inputs = [s for s in others if s.operand.dtype != parameter.operand.dtype]
    if not inputs:
        return None
    name = scene.expression_of(inputs[0]) or "x"
    cast = f"{name} = {name}.to({_precision(scene, parameter)})"
    fix = f"cast the input: {cast}, or run it under torch.autocast"
    if (opened := _wrong_autocast(scene)) is not None:
        return opened
    # A weight is the odd one when the rest of the model has the input's precision (an adapter on a half base).
    weights = [p for module in scene.modules for p in module._parameters.values() if p is not None]
    common = {str(p.dtype).removeprefix("torch.") for p in weights}
    blamed = parameter if inputs[0].operand.dtype in common else inputs[0]
    place = blamed.moved or blamed.born
    if blamed is inputs[0] and blamed.operand.dtype == "float64" and (doubled := _doubles(scene)) is not None:
        return doubled
    if blamed is inputs[0] and (found := assignment(scene, blamed)) and found.cause is not None:
        mover = _mover(scene, blamed)
        cause = source.cause(mover.file, mover.line, "") if mover is not None else found.cause
        chosen = parameter.moved or parameter.born
        at = f" (line {chosen.line})" if chosen is not None and chosen.file == cause.file else ""
        why = f"this is {blamed.operand.dtype}, the weight is {parameter.operand.dtype}{at}"
        edits = _cast_before(scene, name, cast)
        return Verdict(Cause(cause.file, cause.line, cause.code, why), fix, edits=edits)
    if blamed is parameter and (made := _made_beside(parameter, inputs[0].operand.dtype)) is not None:
        return made
    if place is None:
        return Verdict(None, fix)
    why = f"made here in {blamed.operand.dtype}, while its partner is {inputs[0].operand.dtype}"
    return Verdict(source.cause(place.file, place.line, why), fix)


def _mover(scene: Scene, blamed: Suspect) -> Origin | None:
    """The line of the program's own function that brought what a variable got from it: `batch = to_device(batch)`."""
    made = blamed.moved or blamed.born
    function = source.function_at(made.file, made.line) if made is not None else None
    for sight in scene.sights(blamed) if function is not None else ():
        calls = source.call_on(sight.file, sight.made.lineno) if sight.made is not None else ()
        if function is not None and function.name in map(source.called_name, calls):
            return made
    return None


def _precision(scene: Scene, parameter: Suspect) -> str:
    """The weights' precision as the failing line's own code can ask for it."""
    if (weight := scene.expression_of(parameter)) is not None:
        return f"{weight}.dtype"
    for attribute in parameter.attributes:
        model = holders.outermost(attribute.module, scene.modules)
        if scene.frames and (name := holders.expression_for(model, scene.frames[0])) is not None:
            return f"next({name}.parameters()).dtype"
    return "layer.weight.dtype"


def _cast_before(scene: Scene, name: str, cast: str) -> list[Edit]:
    """The cast on a line of its own before the failing one, where that line knows all that it names."""
    here = scene.fault.frame
    statement = source.statement(here.file, here.line) if here is not None else None
    if here is None or statement is None or "layer.weight" in cast or hasattr(statement, "body"):
        return []
    known = {ast.unparse(n) for n in ast.walk(statement) if isinstance(n, ast.Name | ast.Subscript)}
    return [rewrite.before(here.file, statement, cast)] if name in known else []


def _made_beside(parameter: Suspect, wanted: str) -> Verdict | None:
    """A layer that was made on another tensor's device and not in its precision: `Linear(…, device=base.device)`."""
    born = parameter.born
    for call in source.call_on(born.file, born.line) if born is not None else ():
        device = source.keyword(call, "device")
        if (
            born is None
            or not isinstance(device, ast.Attribute)
            or device.attr != "device"
            or source.keyword(call, "dtype") is not None
        ):
            continue
        code = f"{ast.unparse(device).removesuffix('.device')}.dtype"
        why = f"made here in {parameter.operand.dtype}, on the device of what it stands beside but not in its {wanted}"
        return Verdict(
            source.cause(born.file, born.line, why),
            f"Make it in the same precision: dtype={code}; or run it under torch.autocast.",
            edits=[rewrite.add_keyword(born.file, call, "dtype", code)],
        )
    return None


def _doubles(scene: Scene) -> Verdict | None:
    """Numbers that came from numpy as float64: the one line of the program that takes them over."""
    files = dict.fromkeys(frame.file for frame in scene.fault.frames if source.is_user_file(frame.file))
    calls = [(file, call) for file in files for call in source.calls(file, "from_numpy", "as_tensor")]
    if len(calls) != 1:
        return None
    file, call = calls[0]
    code = f"{ast.unparse(call)}.float()"
    why = "numpy's floating-point numbers are float64, and the weights are float32"
    edits = [rewrite.in_place_of(file, call, code)]
    return Verdict(
        source.cause(file, call.lineno, why), f"Cast them where they are taken over: {code}.", edits=edits
    )


def _wrong_autocast(scene: Scene) -> Verdict | None:
    """An autocast around the failing line that was opened for another device type."""
    if (here := scene.fault.frame) is None:
        return None
    device = scene.operands[0].device.split(":")[0]
    for call in source.contexts_around(here.file, here.line):
        if not isinstance(call, ast.Call) or source.called_name(call) != "autocast" or not call.args:
            continue
        opened = getattr(call.args[0], "value", None)
        if isinstance(opened, str) and opened != device:
            why = f'autocast is opened for "{opened}" and the tensors are on {device}: it does nothing here'
            fix = f'torch.autocast("{device}", ...), or torch.autocast(x.device.type, ...)'
            return Verdict(source.cause(here.file, call.lineno, why), fix, "autocast-device")
    return _autocast_elsewhere(scene, device)


def _autocast_elsewhere(scene: Scene, device: str) -> Verdict | None:
    """An autocast that stands around one of the program's lines under a name, and is for another device type."""
    for at in (frame for frame in scene.fault.frames if source.is_user_file(frame.file)):
        live = holders.frame_at(at.file, at.line)
        for opened in source.contexts_around(at.file, at.line) if live is not None else ():
            context = (
                live.f_locals.get(root := source.root(opened), live.f_globals.get(root)) if live else None
            )
            if isinstance(opened, ast.Attribute):
                context = getattr(context, opened.attr, None)
            if not isinstance(context, torch.autocast) or context.device == device:
                continue
            calls = source.calls(at.file, "autocast")
            if len(calls) == 1:
                return _opened_for(at.file, calls[0], str(context.device), device)
    return None


def _opened_for(file: str, call: ast.Call, opened: str, device: str) -> Verdict | None:
    given = source.keyword(call, "device_type") or next(iter(call.args), None)
    if given is None:
        return None
    place, value = trace.decided(file, call.lineno, given)
    why = f'autocast is open for "{opened}" and the tensors are on {device}: it does nothing here'
    said = isinstance(value, ast.Constant) and value.value == opened
    edits = [rewrite.in_place_of(file, value, f'"{device}"')] if said else []
    fix = f'Open it for the tensors\' device: torch.autocast("{device}", ...)'
    if said and place.line != call.lineno:
        fix += f' (line {place.line}: "{device}" instead of "{opened}")'
    return Verdict(
        source.cause(file, place.line if said else call.lineno, why), f"{fix}.", "autocast-device", edits
    )
