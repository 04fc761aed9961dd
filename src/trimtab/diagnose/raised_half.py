"""What autocast and GradScaler refuse: a loss on probabilities, weights that are themselves 16 bits wide.

Looks at the objects of a traceback and follows them to the line that chose the precision. Changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from trimtab.diagnose import rewrite, source, trace
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.raised_common import frames_of, own_frames, values_named
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin

_NARROW = {torch.float16: ("float16", "half"), torch.bfloat16: ("bfloat16",)}


def on_probabilities(error: BaseException) -> Verdict | None:
    """binary_cross_entropy under autocast: the loss on logits in its place, and no sigmoid before it."""
    own = own_frames(error)
    if not own:
        return None
    files = list(dict.fromkeys(frame.f_code.co_filename for frame, _ in own))
    losses = [
        (file, call) for file in files for call in source.calls(file, "BCELoss", "binary_cross_entropy")
    ]
    squashed = [(file, node) for file in files for node in _sigmoids(file)]
    frame, line = own[0]
    file = frame.f_code.co_filename
    why = "this loss takes probabilities, which float16 cannot hold near 0 and 1: autocast refuses it"
    if len(losses) != 1:
        return Verdict(source.cause(file, line, why))
    file, call = losses[0]
    logits = {"BCELoss": "BCEWithLogitsLoss"}.get(
        source.called_name(call), "binary_cross_entropy_with_logits"
    )
    name = ast.unparse(call.func).rpartition(".")
    better = f"{name[0]}{name[1]}{logits}"
    fix = f"Use the loss on logits: {better}"
    if len(squashed) != 1:
        return Verdict(
            source.cause(file, call.lineno, why), f"{fix}, and give it what is before the sigmoid."
        )
    where, node = squashed[0]
    text = _without_sigmoid(node)
    edits = [rewrite.in_place_of(file, call.func, better), rewrite.in_place_of(where, node, text)]
    fix += f", and leave the sigmoid away (line {node.lineno}: {text}); where probabilities are needed, take it there."
    return Verdict(source.cause(file, call.lineno, why), fix, edits=edits)


def _sigmoids(file: str) -> Iterator[ast.Call]:
    return (call for call in source.calls(file, "sigmoid", "Sigmoid", "sigmoid_"))


def _without_sigmoid(call: ast.Call) -> str:
    if source.called_name(call) == "Sigmoid":
        return f"{ast.unparse(call.func).rpartition('.')[0] or 'nn'}.Identity()"
    if call.args:
        return ast.unparse(call.args[0])
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ast.unparse(call)


def narrow_weights(error: BaseException) -> Verdict | None:
    """GradScaler is given 16-bit gradients: the line that made or cast the weights so; of bfloat16, the scaler's."""
    given = [v for v in values_named(error, "optimizer") if hasattr(v, "param_groups")]
    weights = [p for optimizer in given[:1] for group in optimizer.param_groups for p in group["params"]]
    narrow = next((p for p in weights if p.dtype in _NARROW and p.grad is not None), None)
    if narrow is None:
        return None
    files = list(dict.fromkeys(frame.f_code.co_filename for frame in frames_of(error)))
    own = [file for file in files if source.is_user_file(file)]
    if narrow.dtype is torch.bfloat16:
        return _no_scaler(own)
    for place in (origin.cast_of(narrow), origin.moved_of(narrow), origin.born_of(narrow)):
        if place is None or not source.is_user_file(place.file):
            continue
        for at, how, edits in _choices(place.file, place.line, _NARROW[narrow.dtype]):
            why = "this makes the trained weights float16, and so their gradients"
            fix = f"Keep the weights in float32 and let autocast compute in float16: {how}."
            casts = any(source.calls(file, "autocast") for file in own)
            return Verdict(source.cause(at.file, at.line, why), fix, edits=edits if casts else [])
    return None


def _no_scaler(files: list[str]) -> Verdict | None:
    made = [(file, call) for file in files for call in source.calls(file, "GradScaler")]
    if len(made) != 1:
        return None
    file, call = made[0]
    why = "the trained weights are bfloat16, which has the range of float32 and needs no loss scaling"
    code = rewrite.with_keyword(file, call, "enabled", "False")
    return Verdict(
        source.cause(file, call.lineno, why),
        f"Switch the scaler off: {code}.",
        edits=[rewrite.add_keyword(file, call, "enabled", "False")]
        if source.keyword(call, "enabled") is None
        else [],
    )


def _choices(file: str, line: int, words: tuple[str, ...]) -> Iterator[tuple[Place, str, list[Edit]]]:
    """How a line chooses a 16-bit type: a cast, or a type that it is given, followed to where that is said."""
    for call in source.call_on(file, line):
        if isinstance(call.func, ast.Attribute) and call.func.attr in words and not call.args:
            node = source.statement(file, call.lineno)
            alone = isinstance(node, ast.Expr) and node.value is call
            text = ast.unparse(call.func.value)
            edit = rewrite.without(file, node) if alone and node else rewrite.in_place_of(file, call, text)
            yield source.place(file, call.lineno), f"leave .{call.func.attr}() away", [edit]
        for given in (*call.args, *(k.value for k in call.keywords)):
            place, node = trace.decided(file, line, given)
            if isinstance(node, ast.Attribute) and node.attr in words:
                code = f"{ast.unparse(node.value)}.float32"
                yield place, f"{code} here", [rewrite.in_place_of(place.file, node, code)]
            elif isinstance(node, ast.Constant) and node.value in words:
                yield place, '"float32" here', [rewrite.in_place_of(place.file, node, '"float32"')]
