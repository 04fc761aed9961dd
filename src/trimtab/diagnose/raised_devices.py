"""What to change for torch's own errors about devices: DataParallel with its model elsewhere, a replica that is asked
for its parameters, an old constructor."""

from __future__ import annotations

import ast

import torch
from torch import nn

from trimtab.diagnose import devices, mend, rewrite, scope, source
from trimtab.diagnose.raised_common import own_frames, values_named
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Suspect
from trimtab.virtual import faults


def first_device(error: BaseException) -> Verdict | None:
    """The whole model is on one other device: its move, or the list, is the one that is wrong."""
    wrapper = next((w for w in values_named(error, "self") if isinstance(w, nn.DataParallel)), None)
    tensors = [*wrapper.module.parameters(), *wrapper.module.buffers()] if wrapper is not None else []
    if wrapper is None or len({t.device for t in tensors}) != 1 or (call := _made(error)) is None:
        return None
    file, wrap = call
    found, first = tensors[0].device, torch.device("cuda", wrapper.device_ids[0])
    ids = source.keyword(wrap, "device_ids") or (wrap.args[1] if len(wrap.args) > 1 else None)
    why = f"DataParallel wants the model on the first GPU of its list, {first}, and the model is on {found}"
    if found.index in wrapper.device_ids and isinstance(ids, ast.List | ast.Tuple):
        order = [found.index, *(i for i in wrapper.device_ids if i != found.index)]
        edit = rewrite.in_place_of(file, ids, str(order))
        return mend.Mend.by("name the model's GPU first", edit).blames(file, wrap.lineno, why)
    running = [frame for frame, _ in own_frames(error)]
    moved = mend.move_call(Suspect(faults.operand("weight", tensors[0]), tensors[0]))
    if moved is not None and found.type == "cuda":
        where, move = moved
        edit = mend.to_device(where, move, _first(where, move.lineno, file, ids, first))
        why = f"this puts the model on {found}, and DataParallel in line {wrap.lineno} wants its first GPU, {first}"
        return mend.Mend.by("move it there", edit).blames(where, move.lineno, why)
    device = devices.device_at(running, file, wrap.lineno, str(first)) or _first(
        file, wrap.lineno, file, ids, first
    )
    model = source.keyword(wrap, "module") or (wrap.args[0] if wrap.args else None)
    if model is None:
        return Verdict(source.cause(file, wrap.lineno, why))
    return mend.brought("move the model there first", file, model, device).blames(file, wrap.lineno, why)


def replica_asked(error: BaseException) -> Verdict | None:
    """`next(self.parameters())` in a replica of DataParallel, which has none: forward's own input knows the device."""
    if not isinstance(error, StopIteration):
        return None
    why = "a replica of DataParallel has no parameters of its own, so that next() finds none"
    inner = ""
    for frame, line in own_frames(error):
        file, replica = frame.f_code.co_filename, frame.f_locals.get("self")
        inside = source.header(source.statement(file, line))
        nodes = [n for n in inside if isinstance(n, ast.expr) and _asks_for_device(n, inner)]
        if not nodes or not getattr(replica, "_is_replica", False):
            break
        known = ((name, frame.f_locals.get(name)) for name in source.parameters(file, line))
        given = next((name for name, value in known if isinstance(value, torch.Tensor)), None)
        if given is not None:
            edit = rewrite.in_place_of(file, nodes[0], f"{given}.device")
            return mend.Mend.by("ask what it is given", edit).blames(file, line, why)
        inner = f"self.{frame.f_code.co_name}"  # a property or method that asks for it
    return None


def _asks_for_device(node: ast.expr, inner: str) -> bool:
    """`next(self.parameters()).device`, or a call or read of the method that says so."""
    if inner:
        return ast.unparse(node) == inner or (isinstance(node, ast.Call) and ast.unparse(node.func) == inner)
    asked = node.value if isinstance(node, ast.Attribute) and node.attr == "device" else None
    return (
        isinstance(asked, ast.Call)
        and source.called_name(asked) == "next"
        and "parameters(" in ast.unparse(asked)
    )


_OLD = {"FloatTensor": "float", "DoubleTensor": "double", "HalfTensor": "half", "LongTensor": "long"}
_OLD |= {"IntTensor": "int", "ShortTensor": "short", "ByteTensor": "byte", "BoolTensor": "bool"}


def old_type(error: BaseException) -> Verdict | None:
    """`torch.FloatTensor(x)` of a tensor on a GPU: a cast, which keeps it there."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call in source.call_on(file, line):
            cast = _OLD.get(source.called_name(call))
            if cast is None or len(call.args) != 1:
                continue
            why = (
                f"torch.{source.called_name(call)} takes tensors of the host alone, and this one is on a GPU"
            )
            edit = rewrite.in_place_of(file, call, f"{rewrite.operand(call.args[0])}.{cast}()")
            return mend.Mend.by("cast it where it is", edit).blames(file, line, why)
    return None


def _first(where: str, line: int, file: str, ids: ast.expr | None, first: torch.device) -> str:
    """The first GPU of the list, by the list's own name where that is known on a line."""
    known = isinstance(ids, ast.Name | ast.Attribute) and where == file
    if known and ids is not None and scope.is_bound(where, line, source.root(ids)):
        return f"{ast.unparse(ids)}[0]"
    return f'"{first}"'


def _made(error: BaseException) -> tuple[str, ast.Call] | None:
    """The only call in the running files that wraps a model so."""
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error))
    found = [(file, call) for file in files for call in source.calls(file, "DataParallel")]
    return found[0] if len(found) == 1 else None
