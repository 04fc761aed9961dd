"""Which of the program's own expressions gives a device where a line runs: values are looked at where the function
still runs; elsewhere the words of `scope` are trusted, unless the program uses several GPUs. Writes no fix.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import holders, scope, source
from trimtab.virtual import origin

_HELPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")


def device_at(
    frames: list[FrameType],
    file: str,
    line: int,
    wanted: str,
    several: bool = False,
    wrong: frozenset[str] = frozenset(),
) -> str | None:
    """An expression of the program's own that gives the wanted device where the statement on a line runs.

    `several`: the program uses more GPUs than one, so that a word alone proves nothing. `wrong`: what is known to give
    another device.
    """
    frame = frame_of(frames, file, line)
    return (
        device_near(frames, file, line, wanted, several, wrong)
        or _own_weights(frames, file, line, wanted)
        or _first_meaning(scope.texts(file, line, wrong), frames, file, line, wanted, several)
        or (_beside(frame, file, line, wanted) if frame is not None else None)
        or _spelled(file, line, wanted)
    )


def device_near(
    frames: list[FrameType], file: str, line: int, wanted: str, several: bool, wrong: frozenset[str]
) -> str | None:
    """The same of what the function around a line itself knows: its names, its object, what it was given."""
    frame = frame_of(frames, file, line)
    near = scope.texts(file, line, wrong, scope.GLOBAL)
    given = _given_tensor(frame, file, line, wanted) if frame is not None else None
    return _first_meaning(near, frames, file, line, wanted, several) or given


def _first_meaning(
    texts: list[str], frames: list[FrameType], file: str, line: int, wanted: str, several: bool
) -> str | None:
    """The first of these expressions that gives the device, as far as a running function shows."""
    frame = frame_of(frames, file, line)
    for text in texts:
        seen = frame or _witness(frames, file, line, text)
        value = _value(ast.parse(text, mode="eval").body, seen) if seen is not None else None
        if means(value, wanted) or (value is None and not several and scope.sounds_like_device(text)):
            return text
    return None


def _given_tensor(frame: FrameType, file: str, line: int, wanted: str) -> str | None:
    """The device of a tensor, or else of a model, that the running function was given."""
    given = [(name, frame.f_locals.get(name)) for name in source.parameters(file, line)]
    for known in (given, [entry for name, value in given for entry in _entries(name, value)]):
        texts = [text for name, value in known if (text := device_of(name, value, file, line, wanted))]
        if texts:
            return min(texts, key=len)
    return None


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in a dict, list or tuple, each with the code that takes it out."""
    pairs = (
        value.items() if type(value) is dict else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    for key, entry in itertools.islice(pairs, 16):
        if isinstance(entry, torch.Tensor) and isinstance(key, str | int):
            yield (f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key}]"), entry


def device_of(name: str, value: Any, file: str, line: int, wanted: str) -> str | None:
    """Code for the device of a tensor or model, if that is the wanted one, and was so already on a line."""
    if isinstance(value, torch.Tensor) and str(value.device) == wanted:
        return f"{name}.device"
    first = next(value.parameters(), None) if isinstance(value, nn.Module) else None
    if first is None or str(first.device) != wanted:
        return None
    moved = origin.moved_of(first)
    late = moved is not None and moved.file == file and moved.line >= line
    here = moved is not None and source.function_at(file, moved.line) is source.function_at(file, line)
    return None if late and here else f"next({name}.parameters()).device"


def _own_weights(frames: list[FrameType], file: str, line: int, wanted: str) -> str | None:
    """The device of the module whose method holds a line, if one of its class runs and has its weights there."""
    function, owner = source.function_at(file, line), source.class_at(file, line)
    if function is None or owner is None or function.name == "__init__":
        return None
    if [a.arg for a in function.args.args[:1]] != ["self"]:
        return None
    for frame in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and holders.source_of(module) == (file, owner.name):
            first = next(module.parameters(), None)
            if first is not None and str(first.device) == wanted:
                return "next(self.parameters()).device"
    return None


def _spelled(file: str, line: int, wanted: str) -> str | None:
    """The device in words, in a script that spells it out in every place and has no name for it."""
    if source.function_at(file, line) is not None:
        return None
    texts = {text for node in source.walk(file) for text in scope.device_texts(node)}
    words = [w for node in source.walk(file) if isinstance(node, ast.Call) for w in scope.device_words(node)]
    if any(scope.sounds_like_device(text) for text in texts):
        return None
    return next((f'"{word}"' for word in words if means(word, wanted)), None)


def _beside(frame: FrameType, file: str, line: int, wanted: str) -> str | None:
    """A model or tensor of the running function on that device, which got its only value before a line."""
    for name, value in list(frame.f_locals.items()):
        made = source.assignments(file, line, name)
        if len(made) != 1 or made[0].lineno >= line or hasattr(made[0], "body"):
            continue
        if text := device_of(name, value, file, line, wanted):
            return text
    return None


def frame_of(frames: list[FrameType], file: str, line: int) -> FrameType | None:
    """The live frame of the function that holds a line."""
    function = source.function_at(file, line)
    for frame in frames:
        here = frame.f_code.co_filename == file and source.function_at(file, frame.f_lineno) is function
        if here and (function is not None or frame.f_code.co_name == "<module>"):
            return frame
    return None


def _witness(frames: list[FrameType], file: str, line: int, text: str) -> FrameType | None:
    """A running function that sees what an ended one saw: the same `self`, or the same module's names."""
    function, owner = source.function_at(file, line), source.class_at(file, line)
    root = text.split(".")[0].split("[")[0]
    for frame in frames:
        if root == "self":
            named = holders.source_of(frame.f_locals.get("self"))
            if owner is not None and named == (file, owner.name):
                return frame
        elif frame.f_code.co_filename == file and root in frame.f_globals and root not in frame.f_locals:
            local = function is not None and (
                root in scope.arguments(function) or scope.bindings(function, root)
            )
            if not local:
                return frame
    return None


def means(value: Any, wanted: str) -> bool:
    """Whether a value names a device (`cuda` without a number means the present one)."""
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        return False
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError:
        return False
    if device.type == "cuda" and device.index is None:
        return wanted == f"cuda:{torch.cuda.current_device()}"
    return str(device) == wanted


def _value(node: ast.expr, frame: FrameType) -> Any:
    """What an expression for a device stands for; None where that would have to be computed."""
    if isinstance(node, ast.Attribute) and node.attr == "device":
        owner = holders.value_of(node.value, frame)
        if isinstance(owner, torch.Tensor):
            return owner.device
        if owner is not None and type(owner).__module__.partition(".")[0] in _HELPERS:
            return owner.device
    return holders.value_of(node, frame)
