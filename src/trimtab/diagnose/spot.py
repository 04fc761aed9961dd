"""The very expression that runs when a fault is met, and which part of it stands for which operand.

Python keeps the column of every instruction, so that of a long line the failing call alone is looked at. Reads live
frames; computes nothing on tensors.
"""

from __future__ import annotations

import ast
from types import FrameType

import torch
from torch import nn

from trimtab.diagnose import holders, rewrite, source
from trimtab.virtual import origin


def running(frame: FrameType) -> ast.expr | None:
    """The expression that a live frame is carrying out."""
    place = origin.span((frame.f_code, frame.f_lasti))
    return source.node_at(*place) if place is not None else None


def expression(tensor: torch.Tensor, device: str, frame: FrameType) -> ast.expr | None:
    """The part of the running expression that stands for a tensor: one that names it, else the only one left."""
    node = running(frame)
    if node is None:
        return None
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript):
            value = holders.value_of(inner, frame)
            if isinstance(value, torch.Tensor) and value is tensor:
                return inner
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript):
            value = holders.value_of(inner, frame)
            if isinstance(value, torch.Tensor) and holders.same(value, tensor):
                return _outer(node, inner)
    left = [part for part in operands(node) if not _is_elsewhere(part, device, frame)]
    # What names no tensor at all is likelier made on the host than what is computed from those of a GPU.
    if len(left) > 1:
        left = [part for part in left if not _tensors_in(part, frame)]
    return left[0] if len(left) == 1 else None


def partner(device: str, frame: FrameType, without: ast.expr | None = None) -> str | None:
    """Code of the running expression, or of the frame, that names a tensor on a device."""
    node = running(frame)
    if node is not None:
        aside = set(ast.walk(without)) if without is not None else set()
        for inner in ast.walk(node):
            if inner in aside or not isinstance(inner, ast.Name | ast.Attribute):
                continue
            value = holders.value_of(inner, frame)
            if isinstance(value, torch.Tensor) and str(value.device) == device:
                return ast.unparse(inner)
    names = [*source.parameters(frame.f_code.co_filename, frame.f_lineno), *frame.f_locals]
    for name in names:
        value = frame.f_locals.get(name)
        if isinstance(value, torch.Tensor) and str(value.device) == device and value.dim():
            return name
    return None


def called_on(device: str, frame: FrameType) -> str | None:
    """Where the model that is being called has its weights, as code: `next(stage.parameters()).device`."""
    call = running(frame)
    module = holders.value_of(call.func, frame) if isinstance(call, ast.Call) else None
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    if first is None or str(first.device) != device or not isinstance(call, ast.Call):
        return None
    return f"next({ast.unparse(call.func)}.parameters()).device"


def beside(node: ast.expr, device: str, statement: ast.stmt, frame: FrameType) -> list[ast.expr]:
    """The other tensors on the same device that a statement adds to, multiplies or compares: they would fail next."""
    inner = [n for n in source.header(statement) if isinstance(n, ast.BinOp)]
    parts = [p for n in inner for p in (n.left, n.right) if isinstance(p, ast.Name | ast.Attribute)]
    tensors = [(p, holders.value_of(p, frame)) for p in parts if p is not node]
    return [p for p, t in tensors if isinstance(t, torch.Tensor) and t.dim() and str(t.device) == device]


def moved(file: str, node: ast.expr, device: str) -> str:
    """An expression with its result brought to a device, as code."""
    plain = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
    text = rewrite.text_of(file, node)
    return f"{text}.to({device})" if plain else f"({text}).to({device})"


def _outer(top: ast.expr, inner: ast.expr) -> ast.expr:
    """From a name out over the slices and methods that only reshape it, inside the running expression."""
    grown = inner
    for node in ast.walk(top):
        if isinstance(node, ast.Subscript) and node.value is grown and node is not top:
            grown = node
    return grown


def operands(node: ast.expr) -> list[ast.expr]:
    """What the running expression computes with."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call):
        parts = [*node.args, *(k.value for k in node.keywords)]
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in ("torch", "F"):
            parts.insert(0, node.func.value)
        flat = [e for p in parts for e in (p.elts if isinstance(p, ast.List | ast.Tuple) else [p])]
        return [p for p in flat if not isinstance(p, ast.Constant)]
    return []


_LOOKS = frozenset(("size", "shape", "device", "dtype", "dim", "ndim", "numel", "stride", "is_cuda"))
"""What is asked of a tensor without computing with it."""


def _is_elsewhere(node: ast.expr, device: str, frame: FrameType) -> bool:
    """Whether an operand is known to be no tensor, or one on another device."""
    value = holders.value_of(node, frame)
    if isinstance(value, torch.Tensor):
        return str(value.device) != device
    if value is not None or not any(isinstance(n, ast.Name | ast.Call) for n in ast.walk(node)):
        return True
    # A computed operand: on the device of the tensors that it names; what a function makes of them is not known.
    found = _tensors_in(node, frame)
    made = any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) for n in ast.walk(node))
    return bool(found) and not made and all(str(v.device) != device for v in found)


def _tensors_in(node: ast.expr, frame: FrameType) -> list[torch.Tensor]:
    """The tensors that an expression computes with, by name."""
    looked = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in _LOOKS}
    looked |= {
        id(a)
        for n in ast.walk(node)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "len"
        for a in n.args
    }
    indices = [n.slice for n in ast.walk(node) if isinstance(n, ast.Subscript)]
    looked |= {id(n) for index in indices for n in ast.walk(index)}
    named = [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute) and id(n) not in looked]
    return [v for n in named if isinstance(v := holders.value_of(n, frame), torch.Tensor)]
