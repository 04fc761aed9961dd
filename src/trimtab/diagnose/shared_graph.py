"""A graph that is sent backward twice: the tensor through which both passes go, and which of them must let go of it.

What decides is whose weights are behind the tensor: a pass whose optimizer holds none of them needs no graph there.
Looks at the live variables of the failing frames; runs nothing and changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from trimtab.diagnose import flow, graphs, holders, kept, rewrite, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.diagnose.raised_common import own_frames, values_named
from trimtab.diagnose.rules_common import Verdict


class _Common(NamedTuple):
    """A tensor whose graph an earlier pass has freed, as a frame of the failing pass knows it."""

    name: str
    value: torch.Tensor
    frame: FrameType
    line: int


def failing_root(error: BaseException) -> torch.Tensor | None:
    """The loss whose backward pass raised."""
    given = (v for name in ("tensors", "self") for v in values_named(error, name))
    parts = (part for value in given for part in (value if isinstance(value, tuple | list) else [value]))
    return next((p for p in parts if isinstance(p, torch.Tensor) and p.grad_fn is not None), None)


def shared(error: BaseException, freed: set[Any], earlier: Place, stepped: set[int]) -> Verdict | None:
    """What the failing pass has in common with an earlier one, whose nodes are `freed`; `stepped` are the parameters by
    id that an optimizer has changed in between."""
    root, frames = failing_root(error), own_frames(error)
    if root is None or not frames:
        return None
    frame, line = frames[0]
    file = frame.f_code.co_filename
    one_block = file == earlier.file and source.function_at(file, line) is source.function_at(
        file, earlier.line
    )
    common = _common(root, freed, frames)
    if not stepped:
        return _at_once(file, earlier.line, line) if one_block and earlier.line != line else None
    if common is None:
        return None
    behind = {id(leaf) for leaf in graphs.leaves(common.value)}
    later, name = trained_after(frame, line), common.name
    if later is not None and not behind & later:
        since = earlier.line if one_block and common.frame is frame else common.line - 1
        why = f"this goes back through {name}, whose graph line {earlier.line} freed"
        return _let_go(common, _uses(common, since, common.line), "This pass does not train", why)
    if behind & stepped:
        return _again(common, earlier)
    at = common.frame.f_code.co_filename
    made = source.last_assignment(at, common.line, name)
    same = source.function_at(at, common.line) is source.function_at(earlier.file, earlier.line)
    uses = _uses(common, made.lineno if made else 0, earlier.line if same else common.line - 1)[:1]
    why = f"the first loss goes back through {name} too, and frees the graph that line {line} needs"
    return _let_go(common, uses, "This pass does not train", why)


def _common(root: torch.Tensor, freed: set[Any], frames: list[tuple[FrameType, int]]) -> _Common | None:
    """The variable nearest to the loss, in the outermost frame that has it: there it was made."""
    far = graphs.distances(root.grad_fn)
    found = [
        (far[value.grad_fn], -depth, _Common(name, value, frame, line))
        for depth, (frame, line) in enumerate(frames)
        for name, value in list(frame.f_locals.items())
        if isinstance(value, torch.Tensor) and value is not root
        if value.grad_fn in far and value.grad_fn in freed
    ]
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def trained_after(frame: FrameType, line: int) -> set[int] | None:
    """The parameters, by id, of the optimizer that a function steps next after a line; None where it steps none."""
    file = frame.f_code.co_filename
    inside = source.function_at(file, line) or source.tree(file)
    nodes = source.own_statements(inside) if inside is not None else []
    for node in sorted((n for n in nodes if n.lineno > line), key=lambda n: n.lineno):
        for call, owner in source.methods_on(file, node.lineno, "step"):
            for given in (owner, *call.args):
                groups = getattr(holders.value_of(given, frame), "param_groups", None)
                if isinstance(groups, list):
                    return {id(p) for group in groups for p in group["params"]}
    return None


def _let_go(common: _Common, uses: list[ast.Name], which: str, why: str) -> Verdict | None:
    """One pass does not train what is behind the tensor: it is given the values alone."""
    if not uses:
        return None
    file, code = common.frame.f_code.co_filename, f"{common.name}.detach()"
    edits = [rewrite.in_place_of(file, use, code) for use in uses]
    fix = f"{which} what is behind {common.name}: give it {code}: {rewrite.shown(edits)}."
    return Verdict(source.cause(file, uses[0].lineno, why), fix, edits=edits)


def _uses(common: _Common, after: int, until: int) -> list[ast.Name]:
    """Where a frame's function reads a variable, between two lines."""
    file = common.frame.f_code.co_filename
    inside = source.function_at(file, common.line) or source.tree(file)
    found = (n for n in ast.walk(inside or ast.Pass()) if isinstance(n, ast.Name) and n.id == common.name)
    uses = [n for n in found if isinstance(n.ctx, ast.Load) and after < n.lineno <= until]
    return sorted(uses, key=lambda n: (n.lineno, n.col_offset))


def _again(common: _Common, earlier: Place) -> Verdict:
    """Both passes train what is behind the tensor, and a step came between: it is computed anew."""
    file, name = common.frame.f_code.co_filename, common.name
    made = source.last_assignment(file, common.line, name)
    node = source.statement(file, common.line)
    why = f"{name} was computed before the step that changed its weights; line {earlier.line} freed its graph"
    if not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name) or node is None:
        return Verdict(cause_at(earlier, why), f"Compute {name} again after the step.")
    code = rewrite.written(file, made)
    uses = _uses(common, earlier.line if earlier.file == file else common.line - 1, common.line)
    first = source.statement(file, uses[0].lineno) if uses else node
    edits = [rewrite.before(file, first or node, code)]
    fix = f"Compute it again after the step, before line {(first or node).lineno}: {code}."
    return Verdict(source.cause(file, made.lineno, why), fix, edits=edits)


def _at_once(file: str, first: int, second: int) -> Verdict:
    """Two losses with a part of their graphs in common and no step in between: their sum goes backward."""
    why = f"this frees a part of the graph that the loss of line {second} needs too"
    code = f"({loss_name(file, first)} + {loss_name(file, second)}).backward()"
    one, other = source.statement(file, first), source.statement(file, second)
    plain = all(isinstance(n, ast.Expr) and ast.unparse(n).endswith(".backward()") for n in (one, other))
    edits = (
        [rewrite.without(file, one), rewrite.in_place_of(file, other, code)]
        if plain and one and other
        else []
    )
    return Verdict(source.cause(file, first, why), f"Send both losses backward at once: {code}.", edits=edits)


def accumulated(error: BaseException) -> Verdict | None:
    """A sum that is made once before a loop, grows in every round and is sent backward in every round."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        loop, name = flow.loop_at(source.place(file, line)), loss_name(file, line)
        inside = [n for n in ast.walk(loop) if isinstance(n, ast.stmt)] if loop is not None else []
        grows = [n for n in inside if isinstance(n, ast.AugAssign) and ast.unparse(n.target) == name]
        anew = any(isinstance(n, ast.Assign) and name in map(ast.unparse, n.targets) for n in inside)
        made = source.last_assignment(file, loop.lineno, name) if loop is not None else None
        if loop is None or not grows or anew or not isinstance(made, ast.Assign):
            return None
        why = f"{name} still holds the graphs of the rounds before, which their backward passes have freed"
        if len(grows) == 1 and isinstance(grows[0].value, ast.Name):
            one = grows[0].value
            edits = [rewrite.in_place_of(file, one, f"{one.id}.detach()")]
            edits += [rewrite.in_place_of(file, n, one.id) for n in _losses(file, line, name)]
            fix = f"Send this round's loss backward ({one.id}), and add it up without its graph: {one.id}.detach()."
            return Verdict(source.cause(file, grows[0].lineno, why), fix, edits=edits)
        code = rewrite.written(file, made)
        edits = [rewrite.without(file, made), rewrite.before(file, loop.body[0], code)]
        fix = f"Begin it anew in every round, as the first line of the loop of line {loop.lineno}: {code}."
        return Verdict(
            source.cause(file, made.lineno, why), fix, edits=edits if len(made.targets) == 1 else []
        )
    return None


def _losses(file: str, line: int, name: str) -> list[ast.expr]:
    calls = (call for call, _ in source.methods_on(file, line, "backward"))
    return [
        n for call in calls for n in ast.walk(call) if isinstance(n, ast.expr) and ast.unparse(n) == name
    ][:1]


def hoisted(error: BaseException) -> Verdict | None:
    """What was computed once before a loop, and that every round of the loop goes back through."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        loop, root = flow.loop_at(source.place(file, line)), failing_root(error)
        if loop is None or root is None:
            return None
        behind = graphs.distances(root.grad_fn)
        for name, value in list(frame.f_locals.items()):
            made = source.last_assignment(file, loop.lineno, name)
            again = source.assignments(file, line, name)
            inside = any(loop.lineno < n.lineno <= (loop.end_lineno or 0) for n in again)
            if inside or made is None or not isinstance(value, torch.Tensor) or value.grad_fn not in behind:
                continue
            if isinstance(made, ast.Assign) and value.grad_fn is not None:
                return _once(frame, loop, made, name, value)
    return None


def _once(
    frame: FrameType, loop: ast.For | ast.While, made: ast.Assign, name: str, value: torch.Tensor
) -> Verdict:
    file = frame.f_code.co_filename
    why = f"{name} is computed once, and every round of the loop goes back through its graph"
    if (found := _taken_out(frame, made, value)) is not None:
        place, fix, edits = found
        why = f"kept with its graph, through which every round of the loop of line {loop.lineno} goes back ({name})"
        return Verdict(cause_at(place, why), fix, edits=edits)
    code = rewrite.written(file, made)
    one_line = made.lineno == made.end_lineno
    edits = [rewrite.without(file, made), rewrite.before(file, loop.body[0], code)] if one_line else []
    fix = f"Compute it in every round, inside the loop of line {loop.lineno}: {code}"
    fix += f" (or {name}.detach(), if it is not trained)."
    return Verdict(source.cause(file, made.lineno, why), fix, edits=edits)


def _taken_out(frame: FrameType, made: ast.Assign, value: torch.Tensor) -> kept.Found | None:
    """Where a value that a statement only takes out of an object of the program was put there with its graph."""
    behind = graphs.distances(value.grad_fn)
    objects = (
        holders.value_of(n, frame) for n in ast.walk(made.value) if isinstance(n, ast.Name | ast.Attribute)
    )
    plain = [o for o in objects if not isinstance(o, torch.nn.Module | torch.Tensor | type(None))]
    found = (item for one in plain for item in _tensors(one) if item.grad_fn in behind)
    for item in found:
        if (stored := kept.stored(item, [frame])) is not None:
            return stored
    return None


def _tensors(thing: Any) -> Iterable[torch.Tensor]:
    """The tensors in a container, or in the containers that an object has for attributes."""
    values = (
        [thing] if isinstance(thing, list | tuple | dict) else list(getattr(thing, "__dict__", {}).values())
    )
    for value in values:
        items = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        yield from (item for item in items if isinstance(item, torch.Tensor))


def loss_name(file: str, line: int) -> str:
    """What a line sends backward, as it is written there."""
    return next((ast.unparse(loss) for _, loss in source.methods_on(file, line, "backward")), "loss")
