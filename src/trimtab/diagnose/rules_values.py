"""The rules for faults that are not about two devices: precision, generators, tensors that must be on the host."""

from __future__ import annotations

import ast

from trimtab.diagnose import source
from trimtab.diagnose.finding import Cause
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_likely import assignment, birth
from trimtab.diagnose.scene import Scene

_FORKING = {"Process": 1, "Pool": 1, "ProcessPoolExecutor": 1, "fork": 2}
"""What starts a process, the likelier first."""


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
    weight = scene.expression_of(parameter) or "layer.weight"
    fix = f"cast the input: {name} = {name}.to({weight}.dtype), or run it under torch.autocast"
    if (opened := _wrong_autocast(scene)) is not None:
        return opened
    # A weight is the odd one when the rest of the model has the input's precision (an adapter on a half base).
    weights = [p for module in scene.modules for p in module._parameters.values() if p is not None]
    common = {str(p.dtype).removeprefix("torch.") for p in weights}
    blamed = parameter if inputs[0].operand.dtype in common else inputs[0]
    place = blamed.moved or blamed.born
    if blamed is inputs[0] and (found := assignment(scene, blamed)) and found.cause is not None:
        cause = found.cause
        why = f"this is {blamed.operand.dtype}, the weight is {parameter.operand.dtype}"
        return Verdict(Cause(cause.file, cause.line, cause.code, why), fix)
    if place is None:
        return Verdict(None, fix)
    why = f"made here in {blamed.operand.dtype}, while its partner is {inputs[0].operand.dtype}"
    return Verdict(source.cause(place.file, place.line, why), fix)


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
    return None


def host_only(scene: Scene) -> Verdict | None:
    """An operation that wants a tensor of the host and got one of a GPU: nothing else takes part."""
    suspect, here = scene.operands[0], scene.fault.frame
    if here is None:
        return None
    if scene.fault.op.startswith("c10d."):
        return assignment(scene, suspect) or birth(scene, suspect)
    if scene.fault.kind != "pin-of-gpu-tensor":
        return Verdict(source.cause(here.file, here.line, f"the tensor is on {suspect.device}"))
    place = suspect.moved or suspect.born
    line = place.line if place is not None and place.file == here.file else here.line
    if line == here.line and (moved := source.moved_into(here.file, here.line)):
        line = moved
    elif line == here.line:
        # A batch is put together in the loader: what moved its rows stands in the data set or the collator.
        line = source.move_of_rows(here.file) or line
    return Verdict(
        source.cause(here.file, line, f"the data is put on {suspect.device} here, before it is pinned")
    )


def forked(scene: Scene) -> Verdict | None:
    """A forked process touches the GPU: in a loader's worker that very line, else the line that chose to fork."""
    from torch.utils.data import get_worker_info

    here = scene.fault.frame
    if here is None:
        return None
    if get_worker_info() is not None:
        return Verdict(source.cause(here.file, here.line, "a loader's worker may not touch the GPU"))
    starts: list[tuple[int, int]] = []
    for call in source.calls(here.file):
        name = source.called_name(call)
        given = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if name in ("get_context", "set_start_method") and given and given[0] in ("fork", "forkserver"):
            starts.append((0, call.lineno))
        elif name in _FORKING:
            starts.append((_FORKING[name], call.lineno))
    if not starts:
        return None
    why = "the process is forked, after CUDA was initialised in its parent"
    fix = 'start it with torch.multiprocessing.get_context("spawn")'
    return Verdict(source.cause(here.file, min(starts)[1], why), fix)
