"""How calls of a gradient scaler that are missing or made twice are mended. Reads source, runs nothing."""

from __future__ import annotations

import ast

from trimtab.diagnose import flow, rewrite, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.raised_common import known_here


def scaled(place: Place, error: BaseException) -> tuple[str, list[Edit]]:
    """A backward pass past the scaler, written through it (or through accelerate, which holds the scaler)."""
    calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) == "backward"]
    holder = next(known_here(error, lambda value: type(value).__name__ == "Accelerator"), None)
    scalers = known_here(error, lambda value: type(value).__name__.endswith("GradScaler"))
    name = _called(error) or next((name for _, name, _ in scalers), "")
    call = calls[0] if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute) else None
    loss = (
        ast.unparse(call.func.value) if call is not None and isinstance(call.func, ast.Attribute) else "loss"
    )
    if holder is not None:
        code = f"{holder[1]}.backward({loss})"
        edits = [rewrite.in_place_of(place.file, call, code)] if call is not None and not call.args else []
        return f"Let accelerate do it, which holds the scaler: {code}.", edits
    code = f"{name or 'scaler'}.scale({loss}).backward()"
    edits = []
    if call is not None and isinstance(call.func, ast.Attribute) and name:
        edits = [rewrite.in_place_of(place.file, call.func.value, f"{name}.scale({loss})")]
    return f"Scale the loss first: {code}.", edits


def _called(error: BaseException) -> str:
    """The scaler as the failing line of the program writes it: `self.scaler`."""
    from trimtab.diagnose.raised_common import own_frames

    for frame, line in own_frames(error):
        for call in source.call_on(frame.f_code.co_filename, line):
            if source.called_name(call) in ("unscale_", "step", "update") and isinstance(
                call.func, ast.Attribute
            ):
                return ast.unparse(call.func.value)
    return ""


def once(first: Place, again: Place) -> str:
    """Gradients are to be unscaled once in every step: the condition under which the step is taken."""
    if (first.file, first.line) != (again.file, again.line):
        return f"Leave this call out: line {first.line} has unscaled these gradients since the last update()."
    if (condition := flow.condition_of_call(again, ("update", "step"))) is None:
        return "Call scaler.update() in every round in which unscale_ is called."
    return (
        f"Unscale (and clip) only in the rounds that step: move this under `{condition.code.rstrip(':')}` at line "
        f"{condition.line}, before scaler.step."
    )
