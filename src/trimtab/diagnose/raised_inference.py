"""Tensors of torch.inference_mode() in a graph: the switch under which they were made.

Reads the source and the traceback's own values; of several switches it names one only if that one is shown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from trimtab.diagnose import holders, rewrite, source
from trimtab.diagnose.raised_common import own_frames
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin

Mode = tuple[str, "ast.Attribute | ast.Name"]


def inference_tensor(error: BaseException) -> Verdict | None:
    """The one switch of the program; else the one around the line that made the tensor, or in what gave it."""
    tensors = list(_tensors(error))
    born = [made for _, tensor in tensors if (made := origin.born_of(tensor)) is not None]
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error))
    files |= dict.fromkeys(made.file for made in born if source.is_user_file(made.file))
    modes: list[Mode] = [
        (file, node)
        for file in files
        for node in source.walk(file)
        if isinstance(node, ast.Attribute | ast.Name) and source.last_name(node) == "inference_mode"
    ]
    if len(modes) > 1:
        around = [m for m in modes if any(made.file == m[0] and _holds(m, made.line) for made in born)]
        calls = {source.called_name(call) for call, _ in tensors if call is not None}
        modes = around or [m for m in modes if (inside := _function(m)) is not None and inside.name in calls]
    if len(modes) != 1:
        return None
    file, node = modes[0]
    why = "what is made under inference mode can never take part in a graph, and it is trained with later"
    code = f"{ast.unparse(node.value)}.no_grad" if isinstance(node, ast.Attribute) else "torch.no_grad"
    edits = [rewrite.in_place_of(file, node, code)]
    return Verdict(source.cause(file, node.lineno, why), f"Use {code}() here.", edits=edits)


def _tensors(error: BaseException) -> Iterator[tuple[ast.Call | None, torch.Tensor]]:
    """The inference tensors that the failing lines name, each with the call that gave it where one did."""
    for frame, line in own_frames(error):
        file = frame.f_code.co_filename
        node = source.statement(file, line)
        for named in source.header(node) if node is not None else ():
            value = holders.value_of(named, frame) if isinstance(named, ast.Name | ast.Attribute) else None
            if not isinstance(value, torch.Tensor) or not value.is_inference():
                continue
            made = source.last_assignment(file, line, named.id) if isinstance(named, ast.Name) else None
            given = made.value if isinstance(made, ast.Assign) else None
            yield given if isinstance(given, ast.Call) else None, value


def _function(mode: Mode) -> source.Function | None:
    """The function that a switch stands in, or above."""
    return source.function_at(mode[0], mode[1].lineno)


def _holds(mode: Mode, line: int) -> bool:
    """Whether a switch, as a decorator or in a `with`, holds for a line."""
    file, node = mode
    function = source.function_at(file, line)
    opened = [*source.contexts_around(file, line), *(function.decorator_list if function is not None else ())]
    return any(node is inner for one in opened for inner in ast.walk(one))
