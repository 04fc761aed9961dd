"""The rules for faults that are not about two devices: precision, generators, tensors that must be on the host."""

from __future__ import annotations

import ast
import sys
from types import FrameType

import torch

from trimtab.diagnose import holders, rewrite, source, trace
from trimtab.diagnose.finding import Cause, Edit, Place
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_likely import assignment, birth
from trimtab.diagnose.scene import Scene
from trimtab.virtual import origin

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
    if blamed is inputs[0] and blamed.operand.dtype == "float64" and (doubled := _doubles(scene)) is not None:
        return doubled
    if blamed is inputs[0] and (found := assignment(scene, blamed)) and found.cause is not None:
        cause = found.cause
        why = f"this is {blamed.operand.dtype}, the weight is {parameter.operand.dtype}"
        return Verdict(Cause(cause.file, cause.line, cause.code, why), fix)
    if place is None:
        return Verdict(None, fix)
    why = f"made here in {blamed.operand.dtype}, while its partner is {inputs[0].operand.dtype}"
    return Verdict(source.cause(place.file, place.line, why), fix)


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
    if line == here.line and (kept := _kept_on_gpu()) is not None:
        why = f"the data is put on {suspect.device} here, before it is pinned"
        fix = "Leave the data on the CPU and move each batch in the training loop, or set pin_memory=False."
        return Verdict(source.cause(kept.file, kept.line, why), fix)
    if line == here.line and (moved := source.moved_into(here.file, here.line)):
        line = moved
    elif line == here.line:
        # A batch is put together in the loader: what moved its rows stands in the data set or the collator.
        line = source.move_of_rows(here.file) or line
    return Verdict(
        source.cause(here.file, line, f"the data is put on {suspect.device} here, before it is pinned")
    )


def _kept_on_gpu() -> Place | None:
    """Where the rows of the data set that is read now were moved to the GPU, if it holds them as tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        data = getattr(frame.f_locals.get("self"), "_dataset", None)
        while data is not None and not getattr(data, "tensors", None) and hasattr(data, "dataset"):
            data = data.dataset
        held = (*getattr(data, "tensors", ()), *getattr(data, "__dict__", {}).values())
        for tensor in (t for t in held if isinstance(t, torch.Tensor) and t.device.type != "cpu"):
            moved = origin.moved_of(tensor) or origin.born_of(tensor)
            if moved is not None and source.is_user_file(moved.file):
                return source.place(moved.file, moved.line)
        frame = frame.f_back
    return None


_ROWS_ON_CPU = "Keep the rows on the CPU and move the batch in the training loop (or num_workers=0)."


def _in_worker(file: str, line: int) -> Verdict:
    """A loader's worker touches the GPU: the line that does, else the one of its data set that put the rows there."""
    from torch.utils.data import get_worker_info

    from trimtab.diagnose import rows

    info = get_worker_info()
    method = rows.method_of_rows(info.dataset) if info is not None else None
    function = source.function_at(file, line)
    # A forked worker still has its parent's frames below its own: a loop over the loader is not what it runs.
    loops = isinstance(source.statement(file, line), ast.For) or function is None
    if method is not None and loops and (moved := source.move_of_rows(method.file)) is not None:
        why = "the rows are put on the GPU here, and a loader's forked worker may not touch it"
        return Verdict(
            source.cause(method.file, moved, why), _ROWS_ON_CPU, edits=_without_move(method.file, moved)
        )
    return Verdict(source.cause(file, line, "a loader's worker may not touch the GPU"), _ROWS_ON_CPU)


def _made_before_the_fork(scene: Scene) -> Verdict | None:
    """A worker uses a tensor that its parent put on the GPU: the line that did."""
    for frame in scene.frames[:1]:
        file, line = frame.f_code.co_filename, frame.f_lineno
        for name, tensor in holders.expressions(file, line, frame):
            deed = origin.moved_of(tensor) or origin.born_of(tensor)
            if tensor.device.type == "cuda" and deed is not None and (deed.file, deed.line) != (file, line):
                why = f"{name} is put on the GPU here, and a loader's forked worker may not touch it"
                return Verdict(source.cause(deed.file, deed.line, why), _ROWS_ON_CPU)
    return None


def _without_move(file: str, line: int) -> list[Edit]:
    """The moves of the class around a line taken away, where each is a `.to(…)` or `.cuda()` of its own."""
    owner = source.class_at(file, line)
    moves = [
        n
        for n in ast.walk(owner or ast.Pass())
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("to", "cuda")
    ]
    return [
        rewrite.in_place_of(file, m, ast.unparse(m.func.value))
        for m in moves
        if isinstance(m.func, ast.Attribute)
    ]


def forked(scene: Scene) -> Verdict | None:
    """A forked process touches the GPU: in a loader's worker that very line, else the line that chose to fork."""
    from torch.utils.data import get_worker_info

    here = scene.fault.frame
    if here is None:
        return None
    if get_worker_info() is not None:
        return _made_before_the_fork(scene) or _in_worker(here.file, here.line)
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
