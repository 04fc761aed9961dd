"""The way of a tensor from the function that made it to the line that fails: which expression of which running function
handed it on. Reads live frames and source; computes nothing, writes no fix.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import NamedTuple

import torch

from trimtab.diagnose import devices, holders, source, spot, trace
from trimtab.virtual.origin import TORCH


class Hand(NamedTuple):
    """A running function, and what stands in it for a tensor."""

    frame: FrameType
    node: ast.expr
    whole: bool = True
    """Whether the expression gives the tensor itself, and not a tuple that it is taken from."""

    @property
    def file(self) -> str:
        """The file of the function."""
        return self.frame.f_code.co_filename


def way(tensor: torch.Tensor, device: str, frames: list[FrameType]) -> list[Hand]:
    """From the failing expression out: over names, and over parameters to what the caller gave for them."""
    found: list[Hand] = []
    whole = True
    node = spot.expression(tensor, device, frames[0]) if frames else None
    for frame, outer in zip(frames, [*frames[1:], None], strict=True):
        file, line = frame.f_code.co_filename, frame.f_lineno
        while isinstance(node, ast.Name):
            found.append(Hand(frame, node, whole))
            made = _made_here(file, line, node.id)
            if made is None:
                break
            whole = whole and isinstance(made.targets[0], ast.Name)
            line, node = made.lineno, made.value
        if node is None:
            return found
        if not isinstance(node, ast.Name):
            return [*found, Hand(frame, node, whole)]
        node = _given(frame, outer, node.id) if outer is not None else None
    return found


def received(tensor: torch.Tensor, device: str, frames: list[FrameType]) -> Hand | None:
    """The call by which the tensor came out of a function that has ended: `mask_for(5)`, `h, c = self.start(x)`."""
    hands = way(tensor, device, frames)
    return hands[-1] if hands and any(isinstance(n, ast.Call) for n in ast.walk(hands[-1].node)) else None


def device_inside(hand: Hand, file: str, function: source.Function, wanted: str) -> str | None:
    """The parameter of an ended function that was given a tensor on the wanted device, as code for that device."""
    owner = source.class_at(file, function.lineno) if function.name == "__init__" else None
    called = owner.name if owner is not None else function.name
    for call in [
        n for n in ast.walk(hand.node) if isinstance(n, ast.Call) and source.called_name(n) == called
    ]:
        for name in source.parameters(file, function.body[0].lineno):
            given = trace.argument(call, function, name)
            value = holders.value_of(given, hand.frame) if given is not None else None
            if text := devices.device_of(name, value, hand.file, call.lineno, wanted):
                return text
            first = value[0] if isinstance(value, list | tuple) and value else None
            if isinstance(first, torch.Tensor) and str(first.device) == wanted:
                return f"{name}[0].device"
    return None


def called_outside(name: str, frame: FrameType, frames: list[FrameType]) -> str:
    """What the outermost function that has it calls what a function was given under a name."""
    for outer in frames[frames.index(frame) + 1 :]:
        given = _given(frame, outer, name)
        if not isinstance(given, ast.Name):
            break
        name, frame = given.id, outer
    return name


def construction(file: str, function: source.Function, frames: list[FrameType]) -> Hand | None:
    """The only call in a running function that made an object of the class whose constructor this is."""
    owner = source.class_at(file, function.lineno) if function.name == "__init__" else None
    if owner is None:
        return None
    for frame in frames:
        where = frame.f_code.co_filename
        running = source.function_at(where, frame.f_lineno)
        calls = [c for c in source.calls(where, owner.name) if source.function_at(where, c.lineno) is running]
        if len(calls) == 1:
            return Hand(frame, calls[0])
    return None


def _made_here(file: str, line: int, name: str) -> ast.Assign | None:
    """The assignment that last bound a name before a line of the same function."""
    before = [made for made in source.assignments(file, line, name) if made.lineno < line]
    last = before[-1] if before else None
    one = isinstance(last, ast.Assign) and len(last.targets) == 1
    return last if one and isinstance(last, ast.Assign) else None


def _given(frame: FrameType, outer: FrameType, name: str) -> ast.expr | None:
    """What the call that led from one function of the program to the next gave for a parameter."""
    between = frame.f_back
    while between is not None and between is not outer:
        if not between.f_code.co_filename.startswith(TORCH):
            return None
        between = between.f_back
    file = frame.f_code.co_filename
    function, call = source.function_at(file, frame.f_lineno), spot.running(outer)
    if between is None or function is None or not isinstance(call, ast.Call):
        return None
    if name not in source.parameters(file, frame.f_lineno):
        return None
    given = trace.argument(call, function, name)
    return None if isinstance(given, ast.Starred) else given
