"""The rules for two precisions in one operation: which of them was chosen where, and the cast that joins them."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from trimtab.diagnose import casts, holders, owners, rewrite, source, spot, trace
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual.origin import Origin

_SIZES = ("in_features", "out_features", "in_channels", "out_channels", "embedding_dim")


def dtype(scene: Scene) -> Verdict | None:
    """Two precisions in one operation: a layer unlike the rest of its model, else an input that lacks a cast."""
    own = casts.own_function(scene.frames[0]) if scene.frames else None
    if (said := own or _wrong_autocast(scene)) is not None:
        return said
    parameter = next((s for s in scene.operands if s.is_parameter), None)
    if parameter is None:
        odd = scene.operands[-1].tensor
        return _joined(scene, odd) or _meeting(scene)
    others = (s for s in scene.operands if not s.is_parameter)
    given = next((s for s in others if s.operand.dtype != parameter.operand.dtype), None)
    if given is None:
        return None
    if _is_odd(scene, parameter, given):
        return _odd_layer(scene, parameter, given.operand.dtype)
    if given.operand.dtype == "float64" and (doubled := _doubles(scene)) is not None:
        return doubled
    if (said := _joined(scene, given.tensor)) is not None:
        mover = _mover(scene, given)
        if mover is not None and said.cause is not None:
            said.cause = source.cause(mover.file, mover.line, said.cause.why)
        return said
    place = given.moved or given.born
    why = f"this is {given.operand.dtype}, and the weight that it meets is {parameter.operand.dtype}"
    fix = (
        f"cast it to torch.{parameter.operand.dtype} before the layer, or run the model under torch.autocast"
    )
    return Verdict(source.cause(place.file, place.line, why) if place is not None else None, fix)


def refused(scene: Scene) -> Verdict | None:
    """An operation that CUDA does not have in 16 bits, or not in a deterministic way."""
    if "does not have a deterministic implementation" in scene.fault.message:
        return _deterministic(scene)
    frame = scene.frames[0] if scene.frames else None
    node = spot.running(frame) if frame is not None else None
    half = any(s.operand.dtype in ("float16", "bfloat16", "complex32") for s in scene.operands)
    return casts.widened(frame, node) if frame is not None and node is not None and half else None


def _deterministic(scene: Scene) -> Verdict | None:
    """The line that asks for determinism, which one operation of the program cannot give."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = dict.fromkeys([*(frame.file for frame in scene.fault.frames), *filter(None, loaded)])
    found = [
        (file, call)
        for file in files
        if source.is_user_file(file)
        for call in source.calls(file, "use_deterministic_algorithms")
        if call.args and source.is_constant(call.args[0], True)
    ]
    if len(found) != 1:
        return None
    file, call = found[0]
    kernel = scene.fault.message.partition(" does not")[0]
    why = f"this refuses whatever adds in no fixed order, and {kernel} has no other way"
    code = rewrite.with_keyword(file, call, "warn_only", "True")
    fix = f"Let such operations pass with a warning: {code}; or use another operation in its place."
    return Verdict(
        source.cause(file, call.lineno, why),
        fix,
        edits=[rewrite.add_keyword(file, call, "warn_only", "True")],
    )


def _joined(scene: Scene, odd: torch.Tensor | None) -> Verdict | None:
    frame = scene.frames[0] if scene.frames else None
    node = spot.running(frame) if frame is not None else None
    return casts.joined(frame, node, odd) if frame is not None and node is not None else None


def _meeting(scene: Scene) -> Verdict | None:
    """Only the line where two precisions meet is known."""
    here, kinds = scene.fault.frame, dict.fromkeys(s.operand.dtype for s in scene.operands)
    why = f"{' and '.join(kinds)} meet here"
    return Verdict(source.cause(here.file, here.line, why)) if here is not None else None


def _mover(scene: Scene, given: Suspect) -> Origin | None:
    """The line of the program's own function that brought what a variable got from it: `batch = to_device(batch)`."""
    made = given.moved or given.born
    function = source.function_at(made.file, made.line) if made is not None else None
    for sight in scene.sights(given) if function is not None else ():
        calls = source.call_on(sight.file, sight.made.lineno) if sight.made is not None else ()
        if function is not None and function.name in map(source.called_name, calls):
            return made
    return None


def _is_odd(scene: Scene, parameter: Suspect, given: Suspect) -> bool:
    """Whether a weight is the odd one: more of its model's weights have the input's precision than its own.

    Of a layer that stands alone all weights count, if the input was made in that precision by the program's own word.
    """
    held = next(iter(parameter.attributes), None)
    model = owners.outermost(held.module, scene.modules) if held is not None else None
    sizes = _sizes([model]) if model is not None else {}
    born = given.born
    node = source.statement(born.file, born.line) if born is not None else None
    if given.operand.dtype not in sizes and node is not None and rewrite.has_factory(node):
        sizes = _sizes(scene.modules)
    return sizes.get(given.operand.dtype, 0) > sizes.get(parameter.operand.dtype, 0)


def _sizes(modules: Iterable[nn.Module]) -> dict[str, int]:
    """How many weights there are of each precision."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    sizes: dict[str, int] = defaultdict(int)
    for weight in weights.values():
        sizes[str(weight.dtype).removeprefix("torch.")] += weight.numel()
    return sizes


def _odd_layer(scene: Scene, parameter: Suspect, wanted: str) -> Verdict:
    """A layer in another precision than its model: made so, or cast so on purpose."""
    if (made := _made_beside(parameter, wanted)) is not None:
        return made
    own = parameter.operand.dtype
    fix, edits = casts.under_autocast(scene.frames, parameter.device.split(":")[0], wanted)
    place = parameter.cast or parameter.moved or parameter.born
    why = f"this layer is {own}, and the rest of its model is {wanted}"
    where = source.cause(place.file, place.line, why) if place is not None else None
    return Verdict(where, f"Leave it in {wanted} as the rest is, or {fix}.", edits=edits)


def _made_beside(parameter: Suspect, wanted: str) -> Verdict | None:
    """A layer of torch's that was made without a word on its precision, beside others in another one."""
    born = parameter.born if parameter.cast is None else None
    for call in source.call_on(born.file, born.line) if born is not None else ():
        layer = getattr(nn, source.called_name(call), None)
        if born is None or not isinstance(layer, type) or source.keyword(call, "dtype") is not None:
            continue
        code = _precision_beside(call) or f"torch.{wanted}"
        why = f"made here in {parameter.operand.dtype}, while what it stands beside is {wanted}"
        return Verdict(
            source.cause(born.file, born.line, why),
            f"Make it in the same precision: dtype={code}; or run it under torch.autocast.",
            edits=[rewrite.add_keyword(born.file, call, "dtype", code)],
        )
    return None


def _precision_beside(call: ast.Call) -> str | None:
    """The precision of what a layer is sized or placed by: `Linear(base.in_features, 4, device=base.weight.device)`."""
    device = source.keyword(call, "device")
    if isinstance(device, ast.Attribute) and device.attr == "device":
        return f"{ast.unparse(device.value)}.dtype"
    sizes = [a for a in call.args if isinstance(a, ast.Attribute) and a.attr in _SIZES]
    return f"{ast.unparse(sizes[0].value)}.weight.dtype" if sizes else None


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
            return _opened_for(here.file, call, opened, device)
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
