"""Losses whose two sides do not fit: which dimension is too much, in the wrong place or lost, and on which side.

Decided by the shapes that the failing call holds; the side that is changed is the one that the shapes point at.
"""

from __future__ import annotations

import ast
from types import FrameType

import torch
from torch import nn

from trimtab.diagnose import holders, rewrite, source
from trimtab.diagnose.finding import cause_at
from trimtab.diagnose.raised_common import called_by, frames_of, own_frames
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import extents, origin

_CLASSES = ("cross_entropy", "nll_loss")
_EACH = ("binary_cross_entropy_with_logits", "binary_cross_entropy")


def sides(error: BaseException) -> Verdict | None:
    """Scores and targets of shapes that a loss cannot take together."""
    frame = called_by(error, *_CLASSES, *_EACH)
    scores, target = (
        (frame.f_locals.get(n) for n in ("input", "target")) if frame is not None else (None, None)
    )
    if frame is None or not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    one, two = tuple(scores.shape), tuple(target.shape)
    if frame.f_code.co_name in _EACH:
        if one == (*two, 1):
            return _changed(error, 0, f".squeeze({len(two)})", one, two)
        return _changed(error, 1, f".squeeze({len(one)})", one, two) if two == (*one, 1) else None
    if len(one) == len(two) and len(two) > 1 and two[1] == 1 and one[0] == two[0] and one[2:] == two[2:]:
        return _changed(error, 1, ".squeeze(1)", one, two)
    if len(one) == len(two) + 1 and one[:-1] == two and len(two) > 1:
        rest = ", ".join(str(n) for n in range(1, len(two)))
        how = ".transpose(1, 2)" if len(two) == 2 else f".permute(0, {len(two)}, {rest})"
        return _changed(error, 0, how, one, two)
    if len(one) == 2 and len(two) == 1 and two[0] and one[0] % two[0] == 0:
        return _rows_lost(scores, one[0], two[0])
    return None


def _changed(
    error: BaseException, side: int, how: str, one: tuple[int, ...], two: tuple[int, ...]
) -> Verdict | None:
    """One side of the program's own call of the loss, changed."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call in source.call_on(file, line):
            named = source.keyword(call, ("input", "target")[side])
            given = named or (call.args[side] if len(call.args) > side else None)
            if given is None or isinstance(given, ast.Starred) or len(call.args) + len(call.keywords) < 2:
                continue
            code = f"{rewrite.operand(given)}{how}"
            why = f"the scores are {list(one)} here and the targets {list(two)}"
            edits = [rewrite.in_place_of(file, given, code)]
            return Verdict(
                source.cause(file, given.lineno, why), f"Bring them together: {code}.", edits=edits
            )
    return None


def _rows_lost(scores: torch.Tensor, rows: int, wanted: int) -> Verdict | None:
    """A view that makes other rows than the batch has: `x.view(-1, 400)` of rows that hold more than 400 numbers."""
    made = extents.decided_at(scores, 0)
    for call in source.call_on(made.file, made.line) if made is not None else ():
        if source.called_name(call) not in ("view", "reshape") or not isinstance(call.func, ast.Attribute):
            continue
        sizes = (
            call.args[0].elts if len(call.args) == 1 and isinstance(call.args[0], ast.Tuple) else call.args
        )
        if made is None or len(sizes) != 2 or ast.unparse(sizes[0]) != "-1":
            continue
        text = ast.unparse(call.func.value)
        code = f"{text}.{call.func.attr}({text}.size(0), -1)"
        more, width = rows // wanted, ast.unparse(sizes[1])
        why = (
            f"this makes {rows} rows of the batch's {wanted}: each of them holds {more} times {width} numbers"
        )
        fix = f"Keep the rows: {code}; the layer behind it then gets {more} * {width} features."
        return Verdict(
            source.cause(made.file, made.line, why), fix, edits=[rewrite.in_place_of(made.file, call, code)]
        )
    return None


def float_ids(error: BaseException) -> Verdict | None:
    """Floating-point ids that nobody cast: the data set keeps them so; made whole numbers where they are looked up."""
    frame = next((f for f in frames_of(error) if isinstance(f.f_locals.get("self"), nn.Embedding)), None)
    given = frame.f_locals.get("input") if frame is not None else None
    if (
        not isinstance(given, torch.Tensor)
        or not given.is_floating_point()
        or origin.cast_of(given) is not None
    ):
        return None
    for own, line in own_frames(error)[:1]:
        file = own.f_code.co_filename
        nodes = [c.args[0] for c in source.call_on(file, line) if len(c.args) == 1 and _is_embedding(c, own)]
        found = [n for n in nodes if _is_float(n, own)]
        if not found:
            return None
        edits = [rewrite.in_place_of(file, node, f"{rewrite.operand(node)}.long()") for node in found]
        codes = ", ".join(edit.text for edit in edits)
        kind = str(given.dtype).removeprefix("torch.")
        cause = cause_at(
            source.place(file, line),
            f"the rows hold these ids as {kind}, and a table is indexed by whole numbers",
        )
        return Verdict(
            cause, f"Make them whole numbers, here or where the row is made: {codes}.", edits=edits
        )
    return None


def _is_embedding(call: ast.Call, frame: FrameType) -> bool:
    return isinstance(holders.value_of(call.func, frame), nn.Embedding | nn.EmbeddingBag)


def _is_float(node: ast.expr, frame: FrameType) -> bool:
    value = holders.value_of(node, frame)
    return isinstance(value, torch.Tensor) and value.is_floating_point()
