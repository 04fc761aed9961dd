"""How calls of a gradient scaler that are missing or made twice are mended, in the names of the program's own frames.

Reads source and the variables of frames (live, or of a traceback); runs nothing.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from types import FrameType
from typing import Any

from trimtab.diagnose import flow, holders, rewrite, shared_graph, source
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[str, list[Edit]]


def code_for(value: Any, frame: FrameType) -> str | None:
    """How a frame's code reaches an object: a variable, an attribute, a name of the module."""
    if value is None:
        return None
    named = (k for k, v in list(frame.f_globals.items()) if v is value and k.isidentifier())
    return holders.expression_for(value, frame) or next(named, None)


def _named(frames: Iterable[FrameType], value: Any) -> str | None:
    return next((code for frame in frames if (code := code_for(value, frame)) is not None), None)


def scaled(place: Place, frames: Iterable[FrameType], scaler: Any) -> Mend:
    """A backward pass past the scaler, written through it (or through accelerate, which holds the scaler)."""
    calls = list(source.methods_on(place.file, place.line, "backward"))
    call, loss = calls[0] if len(calls) == 1 else (None, None)
    spoken = ast.unparse(loss) if loss is not None else "the loss"
    for frame in frames:
        if (helper := _accelerator(frame)) is not None:
            code = f"{helper}.backward({spoken})"
            edits = (
                [rewrite.in_place_of(place.file, call, code)] if call is not None and not call.args else []
            )
            return f"Let accelerate do it, which holds the scaler: {code}.", edits
        if (named := code_for(scaler, frame)) is not None:
            code = f"{named}.scale({spoken})"
            edits = [rewrite.in_place_of(place.file, loss, code)] if loss is not None else []
            return f"Scale the loss first: {code}.backward().", edits
    return f"Scale the loss first: scaler.scale({spoken}).backward().", []


def _accelerator(frame: FrameType) -> str | None:
    """The name of accelerate's helper, which holds a scaler of its own, in a frame."""
    known = [*frame.f_locals.items(), *frame.f_globals.items()]
    return next((name for name, value in known if type(value).__name__ == "Accelerator"), None)


def _through(helper: str, frame: FrameType) -> tuple[Place, Mend]:
    """A plain clip, made by accelerate, which unscales first."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    calls = [c for c in source.call_on(file, line) if source.called_name(c).startswith("clip_grad_")]
    name = source.called_name(calls[0]) if calls else "clip_grad_norm_"
    edits = [rewrite.in_place_of(file, call.func, f"{helper}.{name}") for call in calls[:1]]
    return source.place(file, line), (
        f"Let accelerate clip, which unscales first: {helper}.{name}(...).",
        edits,
    )


def unscaled_first(frames: Iterable[FrameType], scaler: Any, optimizer: Any) -> tuple[Place | None, Mend]:
    """Gradients that are to be unscaled before they are clipped: the line of the function that knows both objects."""
    for frame in frames:
        if (helper := _accelerator(frame)) is not None:
            return _through(helper, frame)
        names = code_for(scaler, frame), code_for(optimizer, frame)
        node = source.statement(frame.f_code.co_filename, frame.f_lineno)
        if None in names or node is None or hasattr(node, "body"):
            continue
        code = f"{names[0]}.unscale_({names[1]})"
        edits = [rewrite.before(frame.f_code.co_filename, node, code)]
        place = source.place(frame.f_code.co_filename, node.lineno)
        return place, (f"Unscale first, on the line before: {code}.", edits)
    return None, ("Unscale first: scaler.unscale_(optimizer), then clip, then scaler.step(optimizer).", [])


def stepped(place: Place | None, frames: Iterable[FrameType], scaler: Any, owned: bool = False) -> Mend:
    """An optimizer's own step, taken through the scaler; `owned` where another scaler takes it so far."""
    named = _named(frames, scaler)
    for call, owner in source.methods_on(place.file, place.line, "step") if place and named else ():
        code = f"{named}.step({', '.join(map(ast.unparse, (*([] if owned else [owner]), *call.args)))})"
        fix = f"Step through the scaler: {code}, and {named}.update() once behind all steps of the round."
        fix = f"Step through the scaler of that loss: {code}." if owned else fix
        return fix, [rewrite.in_place_of(place.file, call, code)] if place else []
    return "Step through the scaler: scaler.step(optimizer), then scaler.update().", []


def where_due(place: Place) -> Mend:
    """A step of an optimizer whose parameters have a gradient in some rounds only: taken where there is one."""
    node = source.statement(place.file, place.line)
    for call, _ in source.methods_on(place.file, place.line, "step"):
        if call.args and node is not None:
            due = f'any(p.grad is not None for g in {ast.unparse(call.args[0])}.param_groups for p in g["params"])'
            code = f"if {due}:\n    {rewrite.written(place.file, node)}"
            edits = [rewrite.lines_for(place.file, node, code)] if isinstance(node, ast.Expr) else []
            return f"Step only what has a gradient: if {due}: {ast.unparse(call)}.", edits
    return "Step an optimizer only in the rounds in which its parameters have a gradient.", []


def updated(place: Place, frames: Iterable[FrameType], scaler: Any) -> Mend:
    """A step that comes again before the scaler was updated."""
    named = _named(frames, scaler)
    node = source.statement(place.file, place.line)
    if named is None or node is None or hasattr(node, "body"):
        return "Call scaler.update() after each scaler.step(optimizer) that is taken again.", []
    code = f"{named}.update()"
    return f"Update behind this step, which is taken again: {code}.", [rewrite.after(place.file, node, code)]


def stepped_last(place: Place) -> list[Edit]:
    """A step put behind what stands between it and the scaler's update, in the same block."""
    step = source.statement(place.file, place.line)
    for node in source.walk(place.file) if step is not None else ():
        block = getattr(node, "body", None)
        if not isinstance(block, list) or step not in block:
            continue
        for before, after in itertools.pairwise(block[block.index(step) :]):
            calls = [source.called_name(n) for n in source.header(after) if isinstance(n, ast.Call)]
            if "update" in calls and before is not step and isinstance(step, ast.Expr):
                return rewrite.moved(place.file, step, before)
    return []


def once(first: Place, again: Place) -> tuple[Place, Mend]:
    """Gradients are to be unscaled once in every step: the call too many, else the way past the scaler's update."""
    if (first.file, first.line) != (again.file, again.line):
        said, edits = left_out(again)
        return again, (
            f"{said[:-1]}: line {first.line} has unscaled these gradients since the last update().",
            edits,
        )
    if (left := _left_early(again)) is not None:
        return left
    if (condition := flow.condition_of_call(again, ("update", "step"))) is None:
        return again, ("Call scaler.update() in every round in which unscale_ is called.", [])
    if (out := _out_of(again, condition)) is not None:
        return out
    said = f"move this under `{condition.code.rstrip(':')}` at line {condition.line}, before scaler.step"
    return again, (f"Unscale (and clip) only in the rounds that step: {said}.", [])


def left_out(place: Place | None) -> Mend:
    """A call that is one too many, taken away where it has its line to itself and others stand beside it."""
    node = source.statement(place.file, place.line) if place is not None else None
    alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if place is None or node is None or not alone or len(flow.block_of(place.file, node)) < 2:
        return "Leave this call out.", []
    return f"Leave this call out ({ast.unparse(node)}).", [rewrite.without(place.file, node)]


def _scaler_of(at: Place, method: str) -> str:
    return next((ast.unparse(owner) for _, owner in source.methods_on(at.file, at.line, method)), "scaler")


def _left_early(unscaled: Place) -> tuple[Place, Mend] | None:
    """A `continue` or `return` between the line that unscales and the update: the round ends without one."""
    file, code = unscaled.file, f"{_scaler_of(unscaled, 'unscale_')}.update()"
    inside = flow.loop_at(unscaled) or source.function_at(file, unscaled.line)
    nodes = [n for n in ast.walk(inside) if isinstance(n, ast.stmt)] if inside is not None else []
    updates = [n.lineno for n in nodes if isinstance(n, ast.Expr) and ast.unparse(n) == code]
    ends = [n for n in nodes if isinstance(n, ast.Continue | ast.Return) and n.lineno > unscaled.line]
    for end in (n for n in ends if updates and n.lineno < max(updates)):
        fix = f"Update before the round is left (line {end.lineno}): {code}."
        return source.place(file, end.lineno), (fix, [rewrite.before(file, end, code)])
    return None


def _out_of(unscaled: Place, condition: Place) -> tuple[Place, Mend] | None:
    """An update under a condition that hangs on the unscaled gradients, put behind it: a skipped step is one too."""
    file, code = unscaled.file, f"{_scaler_of(unscaled, 'unscale_')}.update()"
    node = source.statement(file, condition.line)
    update = next((n for n in getattr(node, "body", ()) if ast.unparse(n) == code), None)
    block = flow.block_of(file, node)
    known = [n for n in block if unscaled.line <= n.lineno < condition.line]
    asked = source.names_in(node.test) if isinstance(node, ast.If) else set()
    if node is None or update is None or not any(asked & source.bound(n) for n in known):
        return None
    edits = [rewrite.without(file, update), rewrite.after(file, node, code)]
    said = f"Update in every round, behind the `if` of line {node.lineno} and not in it: {code}."
    return source.place(file, update.lineno), (said, edits if len(getattr(node, "body", ())) > 1 else [])


def scaler_added(place: Place | None, frames: Iterable[FrameType], optimizers: list[Any]) -> str:
    """What a loop in float16 without a scaler lacks, in its own names."""
    loss = shared_graph.loss_name(place.file, place.line) if place is not None else "loss"
    frames = list(frames)
    optimizer = next((code for o in optimizers if (code := _named(frames, o)) is not None), "optimizer")
    return (
        f'Make one scaler = torch.amp.GradScaler("cuda") before the loop, and write scaler.scale({loss}).backward(); '
        f"scaler.step({optimizer}); scaler.update(). Or use bfloat16, which has the range of float32."
    )
