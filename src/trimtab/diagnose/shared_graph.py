"""Two backward passes over one graph: the tensor that both losses were computed from, and the use that must let go.

Looks at the live variables of the failing frame; runs nothing and changes nothing.
"""

from __future__ import annotations

import ast
from types import FrameType

import torch

from trimtab.diagnose import flow, graphs, rewrite, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import own_frames
from trimtab.diagnose.rules_common import Verdict


def shared(error: BaseException, earlier: Place, stepped: set[int]) -> Verdict | None:
    """What the graph of an earlier backward pass and that of the failing one share; `stepped` are the parameters by id
    that an optimizer has changed in between."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        first, second = _root(frame, file, earlier.line), _root(frame, file, line)
        if file != earlier.file or first is None or second is None or first is second:
            return None
        near, far = graphs.distances(first.grad_fn), graphs.distances(second.grad_fn)
        both = [
            (near[value.grad_fn], name, value)
            for name, value in list(frame.f_locals.items())
            if isinstance(value, torch.Tensor) and value.grad_fn in near and value.grad_fn in far
            if value is not first and value is not second
        ]
        if not both and not stepped and any(node in far and not hasattr(node, "variable") for node in near):
            return _at_once(file, earlier.line, line)
        if not both:
            return None
        _, name, value = min(both, key=lambda entry: entry[0])
        return _verdict(file, earlier, line, name, value, stepped)
    return None


def _verdict(
    file: str, earlier: Place, line: int, name: str, value: torch.Tensor, stepped: set[int]
) -> Verdict | None:
    behind = {id(leaf) for leaf in graphs.leaves(value)}
    if not stepped:
        return _at_once(file, earlier.line, line)
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


def _at_once(file: str, first: int, second: int) -> Verdict:
    """Two losses with a part of their graphs in common and no step in between: their sum goes backward."""
    why = f"this frees a part of the graph that the loss of line {second} needs too"
    code = f"({loss_name(file, first)} + {loss_name(file, second)}).backward()"
    one, other = source.statement(file, first), source.statement(file, second)
    plain = all(
        isinstance(node, ast.Expr) and ast.unparse(node).endswith(".backward()") for node in (one, other)
    )
    edits = (
        [rewrite.without(file, one), rewrite.in_place_of(file, other, code)]
        if plain and one and other
        else []
    )
    return Verdict(source.cause(file, first, why), f"Send both losses backward at once: {code}.", edits=edits)


def hoisted(error: BaseException) -> Verdict | None:
    """What was computed once before a loop, and that every round of the loop goes back through."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        loop, root = flow.loop_at(source.place(file, line)), _root(frame, file, line)
        if loop is None or root is None:
            return None
        behind = graphs.distances(root.grad_fn)
        for name, value in list(frame.f_locals.items()):
            made = source.last_assignment(file, loop.lineno, name)
            inside = any(
                loop.lineno < n.lineno <= (loop.end_lineno or 0) for n in source.assignments(file, line, name)
            )
            if inside or made is None or not isinstance(value, torch.Tensor) or value.grad_fn not in behind:
                continue
            if isinstance(made, ast.Assign) and value.grad_fn is not None:
                why = f"{name} is computed once, and every round of the loop goes back through its graph"
                code = rewrite.written(file, made)
                one_line = made.lineno == made.end_lineno
                edits = (
                    [rewrite.without(file, made), rewrite.before(file, loop.body[0], code)]
                    if one_line
                    else []
                )
                fix = f"Compute it in every round, inside the loop of line {loop.lineno}: {code}"
                fix += f" (or {name}.detach(), if it is not trained)."
                return Verdict(source.cause(file, made.lineno, why), fix, edits=edits)
    return None


def loss_name(file: str, line: int) -> str:
    """What a line sends backward, as it is written there."""
    return next((ast.unparse(loss) for _, loss in source.methods_on(file, line, "backward")), "loss")


def _root(frame: FrameType, file: str, line: int) -> torch.Tensor | None:
    """The loss that a line sends backward, where it is a variable of the frame."""
    for call, _ in source.methods_on(file, line, "backward"):
        given = [source.root(a) for n in ast.walk(call) if isinstance(n, ast.Call) for a in n.args]
        values = (frame.f_locals.get(name) for name in (source.root(call.func), *given))
        return next((value for value in values if isinstance(value, torch.Tensor)), None)
    return None
