"""The way of a tensor from the function that made it to the line that fails: which expression of which running function
handed it on. Reads live frames and source; computes nothing, writes no fix.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import NamedTuple

import torch

from trimtab.diagnose import holders, source, spot, trace
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
    node = spot.expression(tensor, device, frames[0]) if frames else None
    for frame, outer in zip(frames, [*frames[1:], None], strict=True):
        file, line = frame.f_code.co_filename, frame.f_lineno
        while isinstance(node, ast.Name):
            found.append(Hand(frame, node))
            made = _made_here(file, line, node.id)
            if made is None:
                break
            if not isinstance(made.targets[0], ast.Name):
                return [*found, Hand(frame, made.value, whole=False)]
            line, node = made.lineno, made.value
        if node is None:
            return found
        if not isinstance(node, ast.Name):
            return [*found, Hand(frame, node)]
        node = _given(frame, outer, node.id) if outer is not None else None
    return found


def received(tensor: torch.Tensor, device: str, frames: list[FrameType]) -> Hand | None:
    """The call by which the tensor came out of a function that has ended: `mask_for(5)`, `h, c = self.start(x)`."""
    hands = way(tensor, device, frames)
    return hands[-1] if hands and any(isinstance(n, ast.Call) for n in ast.walk(hands[-1].node)) else None


def device_inside(hand: Hand, file: str, function: source.Function, wanted: str) -> str | None:
    """The parameter of an ended function that was given a tensor on the wanted device, as code for that device."""
    calls = [n for n in ast.walk(hand.node) if isinstance(n, ast.Call)]
    for call in calls:
        if source.called_name(call) != function.name:
            continue
        for name in source.parameters(file, function.body[0].lineno):
            given = trace.argument(call, function, name)
            value = holders.value_of(given, hand.frame) if given is not None else None
            if isinstance(value, torch.Tensor) and str(value.device) == wanted:
                return f"{name}.device"
            first = value[0] if isinstance(value, list | tuple) and value else None
            if isinstance(first, torch.Tensor) and str(first.device) == wanted:
                return f"{name}[0].device"
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
