"""How optimizers and schedules come to do what they were made for: in which order, by which call. Reads source only."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import pairwise

from trimtab.diagnose import flow, mends_graph, mends_layers, rewrite, scope, source
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[Place, str, list[Edit]]
_LENGTHS = frozenset(("num_training_steps", "total_steps", "T_max", "total_iters"))


def after_successor(place: Place, successor: Place) -> Mend:
    """What was given to an optimizer, given to the one that replaces it: the statement put behind that."""
    one = source.statement(place.file, place.line)
    behind = mends_layers.late_deed(place, successor)
    code = " ".join(rewrite.written(place.file, one).split()) if one is not None else place.code
    fix = f"Do this after line {behind.line} ({behind.code}): {code}."
    edits = mends_graph.move_behind(place.file, place, behind)
    other = source.statement(successor.file, successor.line)
    if edits or one is None or other is None or hasattr(one, "body") or place.file != successor.file:
        return place, fix, edits
    known = all(scope.is_bound(successor.file, other.end_lineno or 0, name) for name in source.names_in(one))
    same = source.class_at(place.file, place.line) is source.class_at(successor.file, successor.line)
    if known and same:
        text = rewrite.written(place.file, one)
        edits = [rewrite.without(place.file, one), rewrite.after(successor.file, other, text)]
    return place, fix, edits


def stepped(backward: Place, name: str, instead: Place | None) -> Mend:
    """The step that is missing behind a backward pass: in the place of one that another optimizer takes for nothing."""
    if instead is not None and name and instead.file == backward.file and instead.line > backward.line:
        for call in source.call_on(instead.file, instead.line):
            if source.called_name(call) == "step" and isinstance(call.func, ast.Attribute):
                target = call.args[0] if call.args else call.func.value
                code = rewrite.text_of(instead.file, call).replace(ast.unparse(target), name, 1)
                edits = [rewrite.in_place_of(instead.file, call, code)]
                return instead, f"Step the optimizer of these gradients here: {code}.", edits
    node = source.statement(backward.file, backward.line)
    condition = _condition_of_step(backward, name)
    if condition is not None:
        said = f"`if {ast.unparse(condition.test)}:` never held"
        return (
            source.place(backward.file, condition.lineno),
            f"Step in every n-th pass that there is: {said}.",
            [],
        )
    code = f"{name or 'optimizer'}.step()"
    edits = [rewrite.after(backward.file, node, code)] if isinstance(node, ast.Expr) and name else []
    return backward, f"Step it behind the backward pass: {code}.", edits


def _condition_of_step(backward: Place, name: str) -> ast.If | None:
    """The condition, around a step of this optimizer, that never held."""
    for call in source.calls(backward.file, "step"):
        texts = [ast.unparse(call.func).removesuffix(".step"), *map(ast.unparse, call.args[:1])]
        if name and name in texts:
            return next((n for n in source.above(backward.file, call) if isinstance(n, ast.If)), None)
    return None


def steps_elsewhere(made: Place, name: str) -> bool:
    """Whether a file steps an optimizer of this name somewhere."""
    last = name.rpartition(".")[2]
    for call in source.calls(made.file, "step"):
        given = [ast.unparse(a) for a in call.args]
        if last and last in {
            text.rpartition(".")[2] for text in (ast.unparse(call.func).removesuffix(".step"), *given)
        }:
            return True
    return not last


def is_zero_by_hand(file: str) -> bool:
    """Whether a program writes a rate of 0 in so many words: what has it is not to move."""
    nodes = list(source.walk(file))
    given = [n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "lr"]
    given += [
        n.value for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]).endswith("['lr']")
    ]
    return any(isinstance(value, ast.Constant) and value.value == 0 for value in given)


def reads_gradients(file: str) -> bool:
    """Whether a program itself reads gradients: it may want them for something else than a step."""
    read = (n for n in source.walk(file) if isinstance(n, ast.Attribute) and n.attr == "grad")
    return any(isinstance(n.ctx, ast.Load) and source.last_name(n.value) != "autograd" for n in read)


def longer(lines: list[Place], used: int, steps: int, stepped_at: Place | None, often: int = 1) -> Mend:
    """A schedule made for all steps: on the line that gives its length, which may be a caller's.

    `often`: how many times the schedule goes on in each optimizer step.
    """
    at = lines[0]
    for inner, outer in pairwise(lines):
        named = {
            a.id for c in source.call_on(inner.file, inner.line) for a in _given(c) if isinstance(a, ast.Name)
        }
        if not named & set(source.parameters(inner.file, inner.line)):
            break
        at = outer
    fix = (
        f"Give it the number of all optimizer steps ({steps} in this run)"
        if used
        else "Give it a rate above 0"
    )
    if used and often > 1:
        return _multiplied(at, often)
    rounds = _rounds(stepped_at)
    for call in source.call_on(at.file, at.line) if used and rounds else ():
        for node in _given(call):
            per_round = isinstance(node, ast.Call) and source.called_name(node) == "len"
            if per_round and rounds:
                code = f"{rounds} * {ast.unparse(node)}"
                return at, f"{fix}: {code}.", [rewrite.in_place_of(at.file, node, code)]
    return at, f"{fix}.", []


def _multiplied(at: Place, often: int) -> Mend:
    """The length of a schedule that accelerate steps once for each process, times their number."""
    made = [
        target
        for call in source.calls(at.file, "Accelerator")
        if isinstance(node := source.statement(at.file, call.lineno), ast.Assign)
        for target in node.targets
    ]
    times = f"{ast.unparse(made[0])}.num_processes" if len(made) == 1 else str(often)
    who = " (accelerate steps a prepared one once for each process)" if made else ""
    said = f"It goes on {often} times in each optimizer step{who}: make it {times} times as long"
    for call in source.call_on(at.file, at.line):
        given = next((k.value for k in call.keywords if k.arg in _LENGTHS), None)
        if given is not None:
            code = f"{rewrite.operand(given)} * {times}"
            return at, f"{said}: {code}.", [rewrite.in_place_of(at.file, given, code)]
    return at, f"{said}.", []


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(k.value for k in call.keywords)]


def _rounds(stepped_at: Place | None) -> str:
    """How often the loop around the loop over the batches runs, as it is written."""
    inner = flow.loop_at(stepped_at) if stepped_at is not None else None
    outer = (
        flow.loop_at(source.place(stepped_at.file, inner.lineno))
        if inner is not None and stepped_at
        else None
    )
    times = outer.iter if isinstance(outer, ast.For) else None
    if (
        isinstance(times, ast.Call)
        and source.called_name(times) in ("range", "trange")
        and len(times.args) == 1
    ):
        return rewrite.operand(times.args[0])
    return ""


def other_steps(files: Iterable[str], lines: set[tuple[str, int]]) -> bool:
    """Whether a file calls a step() on another line than those that step optimizers."""
    return any(
        (f, c.lineno) not in lines for f in files for c in source.calls(f, "step", "lr_scheduler_step")
    )


def schedule_stepped(made: Place, stepped_at: Place) -> tuple[str, list[Edit]]:
    """The call that is missing, behind the loop over the batches, or behind the step where there is but one loop."""
    node = source.statement(made.file, made.line)
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if not isinstance(target, ast.Name | ast.Attribute):
        return "Step it, after each epoch or after each optimizer step, as it counts.", []
    code = f"{ast.unparse(target)}.step()"
    inner, step = flow.loop_at(stepped_at), source.statement(stepped_at.file, stepped_at.line)
    outer = flow.loop_at(source.place(stepped_at.file, inner.lineno)) if inner is not None else None
    known = (
        scope.is_bound(stepped_at.file, stepped_at.line, source.root(target)) and made.file == stepped_at.file
    )
    behind = inner if outer is not None else step
    edits = [rewrite.after(stepped_at.file, behind, code)] if known and behind is not None else []
    when = "after each epoch" if outer is not None else "after the optimizer's step"
    return f"Step it {when}: {code}.", edits
