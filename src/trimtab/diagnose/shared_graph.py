"""Two backward passes over one graph: the tensor that both losses were computed from, and the use that must let go.

Looks at the live variables of the failing frame; runs nothing and changes nothing.
"""

from __future__ import annotations

import ast
from collections import deque
from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import own_frames
from trimtab.diagnose.rules_common import Verdict

_MOST = 4000


def shared(error: BaseException, earlier: Place, stepped: set[int]) -> Verdict | None:
    """What the graph of an earlier backward pass and that of the failing one share; `stepped` are the parameters by id
    that an optimizer has changed in between."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        first, second = _root(frame, file, earlier.line), _root(frame, file, line)
        if file != earlier.file or first is None or second is None or first is second:
            return None
        near, far = _distances(first), _distances(second)
        both = [
            (near[value.grad_fn], name, value)
            for name, value in list(frame.f_locals.items())
            if isinstance(value, torch.Tensor) and value.grad_fn in near and value.grad_fn in far
            if value is not first and value is not second
        ]
        if not both:
            return None
        _, name, value = min(both, key=lambda entry: entry[0])
        return _verdict(file, earlier, line, name, value, stepped)
    return None


def _verdict(
    file: str, earlier: Place, line: int, name: str, value: torch.Tensor, stepped: set[int]
) -> Verdict | None:
    behind = {id(node.variable) for node in _distances(value) if hasattr(node, "variable")}
    if not stepped:
        why = f"this frees the graph of {name}, which the loss of line {line} needs too"
        first, second = (_loss_name(file, at) for at in (earlier.line, line))
        fix = f"Send both losses backward at once: ({first} + {second}).backward()."
        return Verdict(source.cause(file, earlier.line, why), fix)
    if behind & stepped:
        why = f"line {line} goes back through {name}, which was computed before the step that changed its weights"
        return Verdict(source.cause(file, earlier.line, why), f"Compute {name} again after the step.")
    made = source.last_assignment(file, earlier.line, name)
    uses = [
        node
        for node in source.walk(file)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        if (made.lineno if made is not None else 0) < node.lineno <= earlier.line
    ]
    if not uses:
        return None
    use = min(uses, key=lambda node: (node.lineno, node.col_offset))
    why = f"the first loss goes back through {name} too, and frees the graph that line {line} needs"
    code = f"{name}.detach()"
    return Verdict(
        source.cause(file, use.lineno, why),
        f"Only the later pass trains what is behind {name}: give this one {code}.",
        edits=[rewrite.in_place_of(file, use, code)],
    )


def _loss_name(file: str, line: int) -> str:
    calls = [c for c in source.call_on(file, line) if source.called_name(c) == "backward"]
    value = calls[0].func.value if calls and isinstance(calls[0].func, ast.Attribute) else None
    return ast.unparse(value) if value is not None else "loss"


def _root(frame: FrameType, file: str, line: int) -> torch.Tensor | None:
    """The loss that a line sends backward, where it is a variable of the frame."""
    for call in source.call_on(file, line):
        if source.called_name(call) == "backward" and isinstance(call.func, ast.Attribute):
            name = source.root(call.func) or next((source.root(a) for a in call.args), "")
            value = frame.f_locals.get(name)
            if not isinstance(value, torch.Tensor):
                given = [source.root(a) for n in ast.walk(call) if isinstance(n, ast.Call) for a in n.args]
                value = next((v for g in given if isinstance(v := frame.f_locals.get(g), torch.Tensor)), None)
            return value if isinstance(value, torch.Tensor) else None
    return None


def _distances(root: torch.Tensor) -> dict[Any, int]:
    """The nodes of a graph, with how far each is from its root."""
    found: dict[Any, int] = {root.grad_fn: 0} if root.grad_fn is not None else {}
    queue = deque(found)
    while queue and len(found) < _MOST:
        node = queue.popleft()
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found[following] = found[node] + 1
                queue.append(following)
    return found
