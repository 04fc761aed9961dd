"""The rule for a tensor on a GPU that only the host reads: one that NumPy is given, lengths of a packed sequence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

import torch

from trimtab.diagnose import holders, mend, rewrite, source, spot
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene


def read_by_host(scene: Scene) -> Verdict | None:
    """The expression that hands the tensor over, or the line that put it into the list which is handed over."""
    suspect = scene.operands[0]
    if not scene.frames or suspect.tensor is None:
        return None
    frame = scene.frames[0]
    file, tensor = frame.f_code.co_filename, suspect.tensor
    why = f"the host reads this tensor, and it is on {suspect.device}"
    for where, value in _gathered(tensor, frame):
        return _copied(
            where, value, tensor, f"what is gathered here is read by the host, and it is on {suspect.device}"
        )
    node = _handed_over(tensor, suspect.device, frame)
    return _copied(file, node, tensor, why) if node is not None else None


def _handed_over(tensor: torch.Tensor, device: str, frame: FrameType) -> ast.expr | None:
    """What stands in the running expression for the tensor."""
    node = spot.running(frame)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy":
        return node.func.value
    # A library may have sorted or cast it on the way: then the only operand that looks like it.
    alike = (
        [part for part in spot.operands(node) if _looks_like(tensor, part, frame)] if node is not None else []
    )
    return alike[0] if len(alike) == 1 else spot.expression(tensor, device, frame)


def _looks_like(tensor: torch.Tensor, part: ast.expr, frame: FrameType) -> bool:
    value = holders.value_of(part, frame)
    if not isinstance(value, torch.Tensor):
        return False
    return (value.device, value.dtype, value.shape) == (tensor.device, tensor.dtype, tensor.shape)


def _gathered(tensor: torch.Tensor, frame: FrameType) -> Iterator[tuple[str, ast.expr]]:
    """What was put into the list that the failing line reads: `losses.append(loss)`, in the same file."""
    file, node = frame.f_code.co_filename, source.statement(frame.f_code.co_filename, frame.f_lineno)
    named = [n for n in source.header(node) if isinstance(n, ast.Name | ast.Attribute)]
    for name in named:
        value = holders.value_of(name, frame)
        if not isinstance(value, list) or not any(entry is tensor for entry in value):
            continue
        puts = [c for c in source.calls(file, "append") if c.args]
        same = [c for c in puts if ast.unparse(c.func) == f"{ast.unparse(name)}.append"]
        if len(same) == 1:
            yield file, same[0].args[0]


def _copied(file: str, node: ast.expr, tensor: torch.Tensor, why: str) -> Verdict:
    """The expression with its result brought to the host."""
    text = rewrite.operand(node) + (".detach().cpu()" if tensor.requires_grad else ".cpu()")
    fix = mend.Mend.by("copy it to the host first", rewrite.in_place_of(file, node, text))
    return fix.blames(file, node.lineno, why)
