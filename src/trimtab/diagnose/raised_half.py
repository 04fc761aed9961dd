"""Types that are too narrow: a loss on probabilities under autocast, 16-bit weights with GradScaler, ids that wrap.

Looks at the objects of a traceback and follows them to the line that chose the precision. Changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from trimtab.diagnose import holders, rewrite, source, trace
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.raised_common import own_frames, values_named
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin
from trimtab.virtual.tensor import payload_of

_SMALL = (torch.int32, torch.int16, torch.int8, torch.uint8)
_NARROW = (torch.float16, torch.bfloat16)


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


def cast_ids(error: BaseException) -> Verdict | None:
    """Whole numbers that were cast with the rest of a batch: the line that casts everything."""
    ids = next((v for v in values_named(error, "input") if isinstance(v, torch.Tensor)), None)
    born = origin.born_of(ids) if ids is not None and ids.is_floating_point() else None
    if born is None or not source.is_user_file(born.file):
        return None
    why = "ids are whole numbers, and this casts them too"
    cause = source.cause(born.file, born.line, why)
    casts = ("half", "bfloat16", "float", "to", "type")
    for call, plain in source.methods_on(born.file, born.line, *casts):
        root, text = source.root(plain), ast.unparse(plain)
        if source.called_name(call) == "to" and not any(
            "dtype" in ast.unparse(a) or "float" in ast.unparse(a) for a in call.args
        ):
            continue
        code = f"({ast.unparse(call)} if {root}.is_floating_point() else {text})"
        edits = [rewrite.in_place_of(born.file, call, code)]
        return Verdict(cause, f"Cast only what is floating-point: {code}.", edits=edits)
    return Verdict(cause)


def narrow_weights(error: BaseException) -> Verdict | None:
    """GradScaler is given 16-bit gradients: the line that made or cast the weights so; of bfloat16, the scaler's."""
    given = [v for v in values_named(error, "optimizer") if hasattr(v, "param_groups")]
    weights = [p for optimizer in given[:1] for group in optimizer.param_groups for p in group["params"]]
    narrow = next((p for p in weights if p.dtype in _NARROW and p.grad is not None), None)
    own = list(dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error)))
    if "BFloat16" in str(error):
        return _no_scaler(own)
    lines = [(at.file, at.line) for at in origin.lines_of(narrow)] if narrow is not None else []
    # Where nothing is known of the weights themselves, the first line of the program that chooses the type.
    lines += [(file, call.lineno) for file in own for call in source.calls(file)]
    for file, line in lines:
        for at, how, edits in choices(file, line, ("float16", "fp16", "half")):
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
        edits=[rewrite.add_keyword(file, call, "enabled", "False")],
    )


def choices(file: str, line: int, words: tuple[str, ...]) -> Iterator[tuple[Place, str, list[Edit]]]:
    """How a line chooses a 16-bit type: a cast, or a type that it is given, followed to where that is said."""
    for call in (c for c in source.call_on(file, line) if source.called_name(c) != "autocast"):
        if isinstance(call.func, ast.Attribute) and call.func.attr in words and not call.args:
            whole = source.statement(file, call.lineno)
            alone = isinstance(whole, ast.Expr) and whole.value is call
            text = ast.unparse(call.func.value)
            edit = rewrite.without(file, whole) if alone and whole else rewrite.in_place_of(file, call, text)
            yield source.place(file, call.lineno), f"leave .{call.func.attr}() away", [edit]
        for given in (*call.args, *(k.value for k in call.keywords)):
            place, node = trace.decided(file, line, given)
            if isinstance(node, ast.Attribute) and node.attr in words:
                code = f"{ast.unparse(node.value)}.float32"
                yield place, f"{code} here", [rewrite.in_place_of(place.file, node, code)]
            elif isinstance(node, ast.Constant) and node.value in words:
                yield place, '"float32" here', [rewrite.in_place_of(place.file, node, '"float32"')]


def wrapped(error: BaseException) -> Verdict | None:
    """A product of whole numbers that their type cannot hold, among what the failing functions computed."""
    for frame, line in own_frames(error):
        file = frame.f_code.co_filename
        function = source.function_at(file, line)
        products = (n for n in ast.walk(function or ast.Pass()) if isinstance(n, ast.BinOp))
        for node in (n for n in products if isinstance(n.op, ast.Mult) and n.lineno <= line):
            sides = [holders.value_of(side, frame) for side in (node.left, node.right)]
            tensors = [s for s in sides if isinstance(s, torch.Tensor) and s.dtype in _SMALL and s.numel()]
            if not tensors or not all(isinstance(s, torch.Tensor | int) for s in sides):
                continue
            most = [int(payload_of(s).abs().max()) if isinstance(s, torch.Tensor) else abs(s) for s in sides]
            dtype = tensors[0].dtype
            if most[0] * most[1] > torch.iinfo(dtype).max:
                kind = str(dtype).removeprefix("torch.")
                why = f"{ast.unparse(node)} is up to {most[0] * most[1]}, which {kind} cannot hold: it wraps around"
                side = node.left if isinstance(sides[0], torch.Tensor) else node.right
                code = f"{rewrite.operand(side)}.long()"
                edits = [rewrite.in_place_of(file, side, code)]
                return Verdict(
                    source.cause(file, node.lineno, why), f"Compute in int64: {code}.", edits=edits
                )
    return None
