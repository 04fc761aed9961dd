"""Rules for what the host works with: a tensor on a GPU that NumPy reads, rows in host memory that a GPU picks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

import torch

from trimtab.diagnose import holders, mend, rewrite, source, spot
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect


def read_by_host(scene: Scene) -> Verdict | None:
    """The expression that hands the tensor over, or the line that put it into the list which is handed over."""
    suspect = scene.operands[0]
    if not scene.frames or suspect.tensor is None:
        return None
    frame = scene.frames[0]
    file, tensor = frame.f_code.co_filename, suspect.tensor
    why = f"the host reads this tensor, and it is on {suspect.device}"
    for where, value in _gathered(tensor, frame):
        said = f"what is gathered here is read by the host, and it is on {suspect.device}"
        return _copied(where, value, tensor, said, gathered=True)
    node = _handed_over(tensor, suspect.device, frame)
    return _copied(file, node, tensor, why) if node is not None else None


def picked_on_host(scene: Scene, stray: Suspect) -> Verdict | None:
    """Rows that are kept in host memory on purpose, picked by numbers from a GPU: the numbers come to the rows."""
    frame, partner = scene.frames[0] if scene.frames else None, scene.partner(stray)
    node = spot.running(frame) if frame is not None else None
    if scene.fault.kind != "index-device" or stray.device != "cpu" or not isinstance(node, ast.Subscript):
        return None
    if frame is None or partner is None or partner.tensor is None:
        return None
    file = frame.f_code.co_filename
    index = spot.expression(partner.tensor, partner.device, frame)
    if index is None or not (_goes_on(file, node) or _brought_home(stray)):
        return None
    why = f"these numbers are on {partner.device}, and the rows that they pick are kept on the host"
    made = source.last_assignment(file, frame.f_lineno, index.id) if isinstance(index, ast.Name) else None
    if isinstance(index, ast.Name) and isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Name):
        picks = [n for n in ast.walk(source.scope_at(file, made.lineno)) if isinstance(n, ast.Subscript)]
        if sum(source.names_in(n.slice) == {index.id} for n in picks) > 1:
            index = made.value
    edit = rewrite.in_place_of(file, index, f"{rewrite.operand(index)}.cpu()")
    return mend.Mend.by("pick with numbers of the host", edit).blames(file, index.lineno, why)


def _goes_on(file: str, node: ast.Subscript) -> bool:
    """Whether what is picked is moved to a device in the same expression: `self.rows[i].to(device)`."""
    above = source.above(file, node)
    method, call = next(above, None), next(above, None)
    return isinstance(method, ast.Attribute) and source.is_move(call) and call.func is method


def _brought_home(stray: Suspect) -> bool:
    """Whether a tensor was brought to the host on purpose, or put together of parts that were."""
    for file, node in filter(None, (stray.moved_by, stray.made_by)):
        parts = {ast.unparse(a) for call in ast.walk(node) if isinstance(call, ast.Call) for a in call.args}
        puts = [
            c for c in source.calls(file, "append") if ast.unparse(c.func).removesuffix(".append") in parts
        ]
        inside = [n for part in (node, *puts) for n in ast.walk(part)]
        if any(isinstance(n, ast.Call) and source.goes_to_host(n) for n in inside):
            return True
    return False


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


def _copied(file: str, node: ast.expr, tensor: torch.Tensor, why: str, gathered: bool = False) -> Verdict:
    """The expression with its result brought to the host."""
    text = rewrite.operand(node) + (".detach().cpu()" if tensor.requires_grad else ".cpu()")
    if gathered and not tensor.dim():
        text = f"{rewrite.operand(node)}.item()"
    fix = mend.Mend.by("copy it to the host first", rewrite.in_place_of(file, node, text))
    return fix.blames(file, node.lineno, why)
