"""Where a condition of the program reads a tensor's shape, and what it read, from the source and the failing frame.

Knows `x.shape[1]`, `x.size(-1)`, `x.shape[:2]`, `x.ndim`, `len(x)`, names that were given such a number, and parameters
for which the caller gave it. Runs none of the program's code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import holders, source


@dataclass(frozen=True)
class Read:
    """A place in a condition that reads the shape of a tensor."""

    name: str
    tensor: torch.Tensor
    dimensions: tuple[int, ...]
    """Those that it reads; none where it asks how many there are."""
    value: Any
    """What it gives: a size, a tuple of sizes, the number of dimensions."""


@dataclass(frozen=True)
class Spot:
    """A line of the program with its live frame, and the line that called it."""

    file: str
    line: int
    frame: FrameType
    outer: Spot | None


def reads(node: ast.AST, spot: Spot, depth: int = 3) -> Iterator[Read]:
    """What an expression reads of a tensor's shape, if it does so; also by a name that was given it before."""
    if isinstance(node, ast.Name) and depth:
        yield from _by_name(node, spot, depth)
        return
    owner, asked = _owner(node)
    tensor = holders.value_of(owner, spot.frame) if owner is not None else None
    if owner is None or not isinstance(tensor, torch.Tensor) or tensor.is_nested:
        return
    name, count = ast.unparse(owner), tensor.dim()
    if asked == "count":
        yield Read(name, tensor, (), count)
    elif asked is None:
        yield Read(name, tensor, tuple(range(count)), tuple(tensor.shape))
    elif isinstance(asked, ast.Slice):
        bounds = [number(part, spot) if part is not None else None for part in (asked.lower, asked.upper)]
        if asked.step is None and all(part is None or isinstance(part, int) for part in bounds):
            chosen = tuple(range(count))[slice(*bounds)]
            yield Read(name, tensor, chosen, tuple(tensor.shape[dimension] for dimension in chosen))
    elif isinstance(index := number(asked, spot), int) and -count <= index < count:
        yield Read(name, tensor, (index % count,), tensor.shape[index])


def _owner(node: ast.AST) -> tuple[ast.expr | None, Any]:
    """Of an expression about a shape: whose it is, and which part is asked (None: all; "count": how many)."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "shape"
    ):
        return node.value.value, node.slice
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim"):
        return node.value, "count" if node.attr == "ndim" else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        if node.func.attr == "size" and len(node.args) < 2:
            return node.func.value, node.args[0] if node.args else None
        if node.func.attr in ("dim", "ndimension") and not node.args:
            return node.func.value, "count"
    if isinstance(node, ast.Call) and source.called_name(node) == "len" and len(node.args) == 1:
        inner, asked = _owner(node.args[0])
        if inner is None:
            return node.args[0], ast.Constant(0)
        return (inner, "count") if asked is None else (None, None)
    return None, None


def _by_name(node: ast.Name, spot: Spot, depth: int) -> Iterator[Read]:
    """A number that was read from a shape earlier (`batch, views = x.shape[:2]`), or by the caller, which gave it."""
    have = holders.value_of(node, spot.frame)
    if not isinstance(have, int | tuple) or isinstance(have, bool):
        return
    made = source.last_assignment(spot.file, spot.line, node.id)
    if made is None and spot.outer is not None and (given := _argument(node.id, spot)) is not None:
        yield from reads(given, spot.outer, depth - 1)
    found: list[Read | None]
    for target, value in source.pairs(made) if isinstance(made, ast.Assign) else ():
        if isinstance(target, ast.Tuple):
            names = [getattr(part, "id", "") for part in target.elts]
            found = [
                _part(r, names.index(node.id)) for r in reads(value, spot, depth - 1) if node.id in names
            ]
        elif isinstance(target, ast.Name) and target.id == node.id:
            found = [*reads(value, spot, depth - 1)]
            # Computed from a size: it is the number that the condition compares.
            computed = (replace(r, value=have) for n in ast.walk(value) for r in reads(n, spot, 0))
            found = found or [*islice(computed, 1)]
        else:
            continue
        # What it was read from may stand for another tensor by now.
        yield from (read for read in found if read is not None and read.value == have)


def _argument(name: str, spot: Spot) -> ast.expr | None:
    """What the caller gave for a parameter of the function around a line."""
    names = source.parameters(spot.file, spot.line)
    function = source.function_at(spot.file, spot.line)
    if spot.outer is None or function is None or name not in names:
        return None
    for call in source.call_on(spot.outer.file, spot.outer.line):
        if source.called_name(call) == function.name:
            given = source.keyword(call, name)
            place = names.index(name)
            return given or (call.args[place] if place < len(call.args) else None)
    return None


def _part(read: Read, index: int) -> Read | None:
    if index >= len(read.dimensions):
        return None
    dimension = read.dimensions[index]
    return Read(read.name, read.tensor, (dimension,), read.tensor.shape[dimension])


def number(node: ast.expr, spot: Spot) -> Any:
    """A whole number, or a tuple of them, that stands in the source or in a variable; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand, spot)
        return -inner if isinstance(inner, int) else None
    if isinstance(node, ast.Tuple | ast.List):
        parts = tuple(number(part, spot) for part in node.elts)
        return None if None in parts else parts
    for read in reads(node, spot, 0):
        return read.value
    found = holders.value_of(node, spot.frame)
    if isinstance(found, list):
        found = tuple(found)
    parts = found if isinstance(found, tuple) else (found,)
    return found if all(isinstance(part, int) for part in parts) else None
