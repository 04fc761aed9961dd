"""The rule for a random generator of another device than the numbers that are drawn with it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from types import FrameType

import torch

from trimtab.diagnose import devices, holders, mend, rewrite, source, spot
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene

_WHY = "this generator belongs to {has}, and the random numbers are drawn on {wants} with it"


def generator(scene: Scene) -> Verdict | None:
    """The line that made the generator; else the sampler or loader that was given one, or the default device."""
    if (frame := scene.fault.frame) is None:
        return None
    has, wants = _devices(scene.fault.message)
    for file, made in _makers(scene, has):
        call = next(
            (c for c in source.call_on(file, made.lineno) if source.called_name(c) == "Generator"), None
        )
        why = _WHY.format(has=has, wants=wants)
        if call is None:
            continue
        if wants != "cpu" and (apart := _drawn_apart(scene, file, made)) is not None:
            return apart
        if wants == "cpu":
            device: str | None = '"cpu"'
        else:
            drawn = f"cuda:{torch.cuda.current_device()}"
            found = devices.device_at(scene.frames, file, made.lineno, drawn) or ""
            device = found if found.isidentifier() or found.startswith("self.") else None
        text = f"{ast.unparse(call.func)}(device={device or repr(wants)})"
        fix = mend.Mend.by("make it there", rewrite.in_place_of(file, call, text))
        return fix.blames(file, call.lineno, why)
    return _given(frame.file, frame.line, has, wants) or _default_device(frame.file, frame.line)


def _drawn_apart(scene: Scene, file: str, made: ast.stmt) -> Verdict | None:
    """A CPU generator that a loader or split draws with as well stays where it is: this draw goes over the host."""
    names = source.bound(made) | source.self_targets(made)
    given = [(c, source.keyword(c, "generator")) for c in source.calls(file, *_DRAWING)]
    shared = next((c for c, g in given if g is not None and source.last_name(g) in names), None)
    frame = scene.frames[0]
    here, draw = frame.f_code.co_filename, spot.running(frame)
    if shared is None or not isinstance(draw, ast.Call):
        return None
    device = source.keyword(draw, "device")
    said = f"line {shared.lineno} draws on the CPU with the same generator"
    why = f"this draws on the GPU with a generator of the CPU, and {said}"
    fix = "Draw on the CPU here and move the numbers"
    if device is None or draw.args[:1] == [device]:
        own = f"torch.Generator(device={ast.unparse(device) if device else repr('cuda')})"
        return Verdict(source.cause(here, draw.lineno, why), f"Give this draw a generator of its own: {own}.")
    changed = copy.deepcopy(draw)
    changed.keywords = [k for k in changed.keywords if k.arg != "device"]
    code = f"{ast.unparse(changed)}.to({ast.unparse(device)})"
    edits = [rewrite.in_place_of(here, draw, code)]
    own = f"torch.Generator(device={ast.unparse(device)})"
    return Verdict(
        source.cause(here, draw.lineno, why),
        f"{fix}: {code}; or give it a second generator, {own}.",
        edits=edits,
    )


def _devices(message: str) -> tuple[str, str]:
    """What the generator is for, and what it should be for."""
    words = message.split("'")
    return (words[3], words[1]) if len(words) > 3 else ("another device", "the GPU")


def _makers(scene: Scene, has: str) -> Iterator[tuple[str, ast.stmt]]:
    """The statements that made the generators of this kind which the running functions know, the nearest first."""
    for frame in scene.frames:
        file, line = frame.f_code.co_filename, frame.f_lineno
        for name, value in list(frame.f_locals.items()):
            own = _is(value, has) and name not in source.parameters(file, line)
            if own and (made := source.last_assignment(file, line, name)) is not None:
                yield file, made
        yield from _global_makers(frame, has)
    for found in holders.kept_in(lambda value: _is(value, has), scene.frames):
        named = holders.source_of(found.owner)
        line_set = source.attribute_assignment(*named, found.name) if named else None
        made = source.statement(named[0], line_set) if named and line_set else None
        if named and made is not None:
            yield named[0], made
    yield from _only_maker(scene, has)


def _only_maker(scene: Scene, has: str) -> Iterator[tuple[str, ast.stmt]]:
    """The one line of the running files that makes a generator of this kind."""
    files = dict.fromkeys(frame.f_code.co_filename for frame in scene.frames)
    made = [(file, call) for file in files for call in source.calls(file, "Generator")]
    fitting = [(f, c) for f, c in made if _makes(c, has)]
    statement = source.statement(fitting[0][0], fitting[0][1].lineno) if len(fitting) == 1 else None
    if statement is not None:
        yield fitting[0][0], statement


def _makes(call: ast.Call, has: str) -> bool:
    """Whether a call makes a generator of a kind of device, as far as it says so."""
    given = [*call.args, *(k.value for k in call.keywords)]
    return any(has in ast.unparse(g) for g in given) if given else has == "cpu"


def _global_makers(frame: FrameType, has: str) -> Iterator[tuple[str, ast.stmt]]:
    file = frame.f_code.co_filename
    node = source.statement(file, frame.f_lineno)
    for name in sorted(source.names_in(node)) if node is not None else ():
        known = name not in frame.f_locals and _is(frame.f_globals.get(name), has)
        if known and (made := source.last_assignment(file, frame.f_lineno, name)) is not None:
            yield file, made


def _is(value: object, has: str) -> bool:
    return isinstance(value, torch.Generator) and value.device.type == has


def _given(file: str, line: int, has: str, wants: str) -> Verdict | None:
    """The sampler or loader that was given a generator in the call itself."""
    for call in _behind(file, line):
        if (given := source.keyword(call, "generator")) is None:
            continue
        made = source.last_assignment(file, call.lineno, given.id) if isinstance(given, ast.Name) else None
        cause = source.cause(file, made.lineno if made else call.lineno, _WHY.format(has=has, wants=wants))
        return Verdict(cause, f'generator=torch.Generator(device="{wants}")')
    return None


def _behind(file: str, line: int) -> Iterator[ast.Call]:
    """The calls on a line, and those that made what it goes over or is given."""
    yield from source.call_on(file, line)
    node = source.statement(file, line)
    for name in sorted(source.names_in(getattr(node, "iter", None) or node)) if node is not None else ():
        if (made := source.last_assignment(file, line, name)) is not None:
            yield from source.call_on(file, made.lineno)


_DRAWING = ("random_split", "DataLoader", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def _default_device(file: str, line: int) -> Verdict | None:
    """A default device for all: samplers that hold a CPU generator draw on it too."""
    for call in source.calls(file, "set_default_device", "set_default_tensor_type"):
        why = f"line {call.lineno} makes random numbers be drawn on the GPU, and this draws with a generator of the CPU"
        drawing = _drawing(file, line)
        if drawing is not None and call.args:
            device = (
                ast.unparse(call.args[0]) if source.called_name(call) == "set_default_device" else '"cuda"'
            )
            own = rewrite.add_keyword(file, drawing, "generator", f"torch.Generator(device={device})")
            return mend.Mend.by("give it one of the GPU", own).blames(file, drawing.lineno, why)
        why = (
            "from here on random numbers are drawn on this device, also by samplers that hold a CPU generator"
        )
        fix = "give device= where tensors are made; set no global default"
        return Verdict(source.cause(file, call.lineno, why), fix)
    return None


def _drawing(file: str, line: int) -> ast.Call | None:
    """The call that draws without a generator of its own: on the line, or the one that made what it goes over."""
    here = [c for c in _behind(file, line) if source.called_name(c) in _DRAWING]
    if not here:
        loaders = source.calls(file, "DataLoader")
        shuffled = [c for c in loaders if source.is_constant(source.keyword(c, "shuffle"), True)]
        here = shuffled if len(shuffled) == 1 else []
    open_ = [c for c in here if source.keyword(c, "generator") is None]
    return open_[0] if open_ else None
