"""How calls of a gradient scaler that are missing or made twice are mended, in the names of the program's own frames.

Reads source and the variables of frames (live, or of a traceback); runs nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import FrameType
from typing import Any

from trimtab.diagnose import flow, holders, rewrite, source
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[str, list[Edit]]


def code_for(value: Any, frame: FrameType) -> str | None:
    """How a frame's code reaches an object: a variable, an attribute, a name of the module."""
    if value is None:
        return None
    named = (k for k, v in list(frame.f_globals.items()) if v is value and k.isidentifier())
    return holders.expression_for(value, frame) or next(named, None)


def scaled(place: Place, frames: Iterable[FrameType], scaler: Any) -> Mend:
    """A backward pass past the scaler, written through it (or through accelerate, which holds the scaler)."""
    calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) == "backward"]
    call = calls[0] if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute) else None
    loss = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    spoken = ast.unparse(loss) if loss is not None else "the loss"
    for frame in frames:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if type(value).__name__ == "Accelerator":
                code = f"{name}.backward({spoken})"
                edits = (
                    [rewrite.in_place_of(place.file, call, code)]
                    if call is not None and not call.args
                    else []
                )
                return f"Let accelerate do it, which holds the scaler: {code}.", edits
        if (named := code_for(scaler, frame)) is not None:
            code = f"{named}.scale({spoken})"
            edits = [rewrite.in_place_of(place.file, loss, code)] if loss is not None else []
            return f"Scale the loss first: {code}.backward().", edits
    return f"Scale the loss first: scaler.scale({spoken}).backward().", []


def unscaled_first(frames: Iterable[FrameType], scaler: Any, optimizer: Any) -> tuple[Place | None, Mend]:
    """Gradients that are to be unscaled before they are clipped: the line of the function that knows both objects."""
    for frame in frames:
        names = code_for(scaler, frame), code_for(optimizer, frame)
        node = source.statement(frame.f_code.co_filename, frame.f_lineno)
        if None in names or node is None or hasattr(node, "body"):
            continue
        code = f"{names[0]}.unscale_({names[1]})"
        edits = [rewrite.before(frame.f_code.co_filename, node, code)]
        place = source.place(frame.f_code.co_filename, node.lineno)
        return place, (f"Unscale first, on the line before: {code}.", edits)
    return None, ("Unscale first: scaler.unscale_(optimizer), then clip, then scaler.step(optimizer).", [])


def stepped(place: Place | None, frames: Iterable[FrameType], scaler: Any) -> Mend:
    """An optimizer's own step, taken through the scaler."""
    calls = source.call_on(place.file, place.line) if place is not None else ()
    named = next((code for frame in frames if (code := code_for(scaler, frame)) is not None), None)
    for call in calls:
        if source.called_name(call) == "step" and isinstance(call.func, ast.Attribute) and named and place:
            given = ", ".join([ast.unparse(call.func.value), *map(ast.unparse, call.args)])
            code = f"{named}.step({given})"
            fix = f"Step through the scaler: {code}, and {named}.update() once behind all steps of the round."
            return fix, [rewrite.in_place_of(place.file, call, code)]
    return "Step through the scaler: scaler.step(optimizer), then scaler.update().", []


def updated(place: Place, frames: Iterable[FrameType], scaler: Any) -> Mend:
    """A step that comes again before the scaler was updated."""
    named = next((code for frame in frames if (code := code_for(scaler, frame)) is not None), None)
    node = source.statement(place.file, place.line)
    if named is None or node is None or hasattr(node, "body"):
        return "Call scaler.update() after each scaler.step(optimizer) that is taken again.", []
    code = f"{named}.update()"
    return f"Update behind this step, which is taken again: {code}.", [rewrite.after(place.file, node, code)]


def once(first: Place, again: Place) -> Mend:
    """Gradients are to be unscaled once in every step: the condition under which the step is taken."""
    if (first.file, first.line) != (again.file, again.line):
        node = source.statement(again.file, again.line)
        alone = isinstance(node, ast.Expr) and len(list(source.call_on(again.file, again.line))) == 1
        edits = [rewrite.without(again.file, node)] if alone and node is not None else []
        return (
            f"Leave this call out: line {first.line} has unscaled these gradients since the last update().",
            edits,
        )
    if (condition := flow.condition_of_call(again, ("update", "step"))) is None:
        return "Call scaler.update() in every round in which unscale_ is called.", []
    return (
        f"Unscale (and clip) only in the rounds that step: move this under `{condition.code.rstrip(':')}` at line "
        f"{condition.line}, before scaler.step.",
        [],
    )


def scaler_added(place: Place | None, frames: Iterable[FrameType], optimizers: list[Any]) -> Mend:
    """A loop in float16 without a scaler, given one: made before the loop, used for the loss and for the step."""
    said = (
        "Scale the loss: scaler.scale(loss).backward(), then scaler.step(optimizer) and scaler.update(), with one "
        'scaler = torch.amp.GradScaler("cuda"); or use bfloat16, which has the range of float32.'
    )
    frame = next(iter(frames), None)
    loop = _outermost_loop(place) if place is not None else None
    if frame is None or place is None or loop is None or frame.f_lineno != place.line:
        return said, []
    calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) == "backward"]
    steps = [
        n
        for n in ast.walk(loop)
        if isinstance(n, ast.Expr)
        and isinstance(n.value, ast.Call)
        and isinstance(n.value.func, ast.Attribute)
        and n.value.func.attr == "step"
        and any(holders.value_of(n.value.func.value, frame) is optimizer for optimizer in optimizers)
    ]
    if len(calls) != 1 or not isinstance(calls[0].func, ast.Attribute) or len(steps) != 1:
        return said, []
    loss, step = calls[0].func.value, steps[0]
    assert isinstance(step.value, ast.Call)
    assert isinstance(step.value.func, ast.Attribute)
    stepped_by = f"scaler.step({ast.unparse(step.value.func.value)})"
    edits = [
        rewrite.before(place.file, loop, 'scaler = torch.amp.GradScaler("cuda")'),
        rewrite.in_place_of(place.file, loss, f"scaler.scale({ast.unparse(loss)})"),
        rewrite.in_place_of(place.file, step, stepped_by),
        rewrite.after(place.file, step, "scaler.update()"),
    ]
    return f"{said} Here: scaler.scale({ast.unparse(loss)}).backward(), {stepped_by}.", edits


def _outermost_loop(place: Place) -> ast.For | ast.While | None:
    """The outermost loop of the function around a line that holds it."""
    scope = source.function_at(place.file, place.line) or source.tree(place.file)
    loops = [n for n in source.own_statements(scope) if isinstance(n, ast.For | ast.While)] if scope else []
    around = [n for n in loops if n.lineno < place.line <= (n.end_lineno or 0)]
    return min(around, key=lambda n: n.lineno, default=None)
