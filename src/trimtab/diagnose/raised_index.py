"""Indices out of range, which a GPU answers with a device-side assert: which number, in which table, who decided it.

Reads the failing call's own tensors (ids, labels, tables) from the traceback; computes nothing but their extremes.
"""

from __future__ import annotations

import ast
import re
from types import FrameType

import torch
from torch import nn

from trimtab.diagnose import holders, raised_half, raised_marks, rewrite, rows, source, trace
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.diagnose.index_makers import (
    born_at,
    extremes,
    numbers_made,
    rows_decided,
    rows_given,
    width_decided,
)
from trimtab.diagnose.mends_sizes import classes_numbered, counted_from_one, is_count, is_shared, more, wider
from trimtab.diagnose.raised_common import called_by, known_here, own_frames, values_named
from trimtab.diagnose.raised_labels import skipped
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin
from trimtab.virtual.tensor import payload_of

_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for dimension \d+ with size (\d+)")
_LENGTHS = ("position", "length", "ctx", "context", "seq")
_KINDS = ("vocab", "type", "token", "num_embeddings")


def out_of_range(error: BaseException) -> Verdict | None:
    """What was out of range, if the failing call shows it."""
    if (frame := called_by(error, "cross_entropy", "nll_loss")) is not None:
        return _labels(frame, error)
    if (frame := called_by(error, "embedding", "embedding_bag")) is not None:
        return _ids(frame, error)
    return _indexed(error)


def _labels(frame: FrameType, error: BaseException) -> Verdict | None:
    scores, target = frame.f_locals.get("input"), frame.f_locals.get("target")
    ignored = frame.f_locals.get("ignore_index", -100)
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not scores.dim():
        return None
    labels = payload_of(target).flatten()
    classes = int(scores.shape[1] if scores.dim() > 1 else scores.shape[0])
    bad = labels[((labels < 0) | (labels >= classes)) & (labels != ignored)]
    if not bad.numel() or target.is_floating_point():
        return None
    low, high = int(bad.min()), int(bad.max())
    kept = labels[labels != ignored]
    # One number far from all others is no class: positions to skip are marked by it (255 in masks, -1 in labels).
    if low == high and (high < 0 or high > classes + 1) and bad.numel() < kept.numel():
        return skipped(low, int(ignored), error)
    if low == high < 0:
        return skipped(low, int(ignored), error)
    made = rows.label_line(error) or numbers_made(error, high) or born_at(target)
    top, least = int(kept.max()), int(kept.min())
    span = f"the labels go from {least} to {top}, the scores have {classes} classes (0 to {classes - 1})"
    if least > 0 and top == classes:
        return _from_one(made, span, f" (or make the head one class wider: {top + 1})")
    wide = width_decided(scores, classes)
    if wide is not None and is_count(wide[1]) and made is not None and top > classes:
        # The head has one score for each class that the program knows: the labels are no numbers of theirs.
        said = f"Number the classes from 0 to {classes - 1} where a row's label is made"
        edits = classes_numbered(error, made)
        table = f", with {edits[1].text.strip()} after line {edits[1].start[0] - 1}" if edits else ""
        return Verdict(cause_at(made, span), f"{said}{_code(edits[:1])}{table}.", edits=edits)
    place, edits = wider(wide, classes, top + 1, error)
    fix = (
        f"Make the head as wide as there are classes ({top + 1} instead of {classes}){_code(edits)}, or map the labels "
        f"to 0 … {classes - 1}{_at(made)}."
    )
    return Verdict(cause_at(place or made, span), fix, edits=edits)


def _from_one(made: Place | None, why: str, otherwise: str = "") -> Verdict:
    """Numbers that are counted from 1 where they are counted from 0: subtracted where a row's label is made."""
    node = rows.label_value(made) if made is not None else None
    counted = counted_from_one(made, chosen=node is None) if made is not None else None
    if counted is not None:
        place, edit = counted
        said = f"Count from 0 where they are chosen: {rewrite.shown([edit])}."
        return Verdict(cause_at(place, why), said, edits=[edit])
    statement = source.statement(made.file, made.line) if made is not None else None
    if node is None and isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        one = isinstance(statement.targets[0], ast.Name) and not isinstance(statement.value, ast.Tuple)
        node = statement.value if one else None
    fix = "Count from 0: subtract 1 where they are made"
    if made is None or node is None:
        return Verdict(cause_at(made, why), f"{fix}{otherwise}.")
    text = f"{rewrite.operand(node)} - 1"
    return Verdict(cause_at(made, why), f"{fix}: {text}.", edits=[rewrite.in_place_of(made.file, node, text)])


def _code(edits: list[Edit]) -> str:
    return f": {rewrite.shown(edits)}" if edits else ""


def _at(made: Place | None) -> str:
    return f" where they are made (line {made.line})" if made is not None else ""


def _indexed(error: BaseException) -> Verdict | None:
    """gather, scatter, one_hot and plain indexing: the number that is out of range, and who made it."""
    said = _BOUNDS.search(str(error))
    frame_line = next(iter(own_frames(error)), None)
    if said is None or frame_line is None:
        return None
    bad, size = int(said[1]), int(said[2])
    frame, line = frame_line
    file = frame.f_code.co_filename
    node = source.statement(file, line)
    named = [n for n in source.header(node) if isinstance(n, ast.Name | ast.Attribute)]
    for name, tensor in ((ast.unparse(n), holders.value_of(n, frame)) for n in named):
        ends = extremes(tensor) if isinstance(tensor, torch.Tensor) else None
        if ends is None or (ends[0] >= 0 and ends[1] < size):
            continue
        if (marked := raised_marks.used_as_rows(file, line, name, tensor, size)) is not None:
            return marked
        made = rows.label_line(error) if name in rows.LABELS else None
        made = made or numbers_made(error, ends[1] if ends[1] >= size else ends[0]) or born_at(tensor)
        why = f"{name} goes from {ends[0]} to {ends[1]}, and what it indexes has {size} entries (0 to {size - 1})"
        if ends[0] > 0 and ends[1] == size:
            return _from_one(made, why, f", or make room for {size + 1}")
        wide = _size_of_one_hot(file, line, frame, size)
        if wide is not None and ends[0] >= 0:
            place, edits = wider(wide, size, ends[1] + 1, error)
            fix = (
                f"Make room for {ends[1] + 1}{_code(edits)}, or map the numbers to 0 … {size - 1}{_at(made)}."
            )
            return Verdict(cause_at(place, why), fix, edits=edits)
        room = f", or make room for {ends[1] + 1}" if ends[1] >= size else ""
        return Verdict(cause_at(made, why), f"Make only numbers from 0 to {size - 1} here{room}.")
    if (made := numbers_made(error, bad)) is None:
        return None
    why = f"{bad} is among these numbers, and what they index has {size} entries (0 to {size - 1})"
    return Verdict(cause_at(made, why), f"Make only numbers from 0 to {size - 1} here.")


def _size_of_one_hot(file: str, line: int, frame: FrameType, size: int) -> tuple[Place, ast.expr] | None:
    """Where the number of classes that one_hot is told was decided."""
    for call in source.call_on(file, line):
        given = source.keyword(call, "num_classes") or (call.args[1] if len(call.args) > 1 else None)
        if source.called_name(call) == "one_hot" and given is not None:
            return trace.decided(file, line, given)
    return None


def _ids(frame: FrameType, error: BaseException) -> Verdict | None:
    ids, table = frame.f_locals.get("input"), frame.f_locals.get("weight")
    if not isinstance(ids, torch.Tensor) or not isinstance(table, torch.Tensor) or not ids.numel():
        return None
    values = payload_of(ids)
    low, high, size = int(values.min()), int(values.max()), int(table.shape[0])
    if low < 0:
        if (wrapped := raised_half.wrapped(error)) is not None:
            return wrapped
        why = f"an id is {low}, and a table has no such row"
        return Verdict(
            cause_at(born_at(ids), why),
            "Pad ids with 0 or the pad token's id; only labels are padded with -100.",
        )
    if high < size:
        return None
    if (verdict := _tokens(size, error)) is not None:
        return verdict
    last = values.shape[-1] if values.dim() else 1
    counts = values.flatten()[:last].tolist() == list(
        range(int(values.flatten()[0]), int(values.flatten()[0]) + last)
    )
    span, given = origin.spans_of(ids)[0], rows_given(table)
    made_by = source.last_name(getattr(source.node_at(*span), "func", ast.Pass())) if span is not None else ""
    place: Place | None
    if (
        given is not None
        and (made_by in ("bucketize", "searchsorted") or (counts and last > 1))
        and is_shared(*given)
    ):
        # The rows are as long as the setting says, and what is put to them besides: n bounds part n + 1 buckets.
        place, edits = given[0], [more(*given, high + 1 - size)]
    else:
        place, edits = wider(rows_decided(table), size, high + 1, error)
    made = place or _table_made(error, _LENGTHS if counts and last > 1 else _KINDS)
    if counts and last > 1:
        why = f"the table has {size} positions, and the rows are {high + 1} long"
        fix = (
            f"Make the table as long as the rows are ({high + 1}){_code(edits)}, or cut the rows to {size}: keep the "
            "length in one setting that both read."
        )
        return Verdict(cause_at(made or born_at(ids), why), fix, edits=edits)
    why = f"the table has {size} rows (ids 0 to {size - 1}), and the largest id is {high}"
    ids_made = numbers_made(error, high)
    fix = f"Give the table at least {high + 1} rows{_code(edits)}, or map the ids to 0 … {size - 1}{_at(ids_made)}."
    return Verdict(cause_at(made or ids_made or born_at(ids), why), fix, edits=edits)


def _tokens(size: int, error: BaseException) -> Verdict | None:
    """A tokenizer knows more tokens than the model's table has rows."""
    tokenizers = known_here(error, lambda v: hasattr(v, "get_added_vocab") and len(v) > size)
    if (found := next(tokenizers, None)) is None:
        return None
    frame, tokenizer, known = found
    models = known_here(error, lambda v: isinstance(v, nn.Module) and hasattr(v, "resize_token_embeddings"))
    model = next((name for _, name, _ in models), "model")
    why = f"the tokenizer knows {len(known)} tokens from here on, and the model's table has {size} rows"
    code = f"{model}.resize_token_embeddings(len({tokenizer}))"
    file = frame.f_code.co_filename
    adds = [call for call in source.calls(file, "add_tokens", "add_special_tokens")]
    if not adds:
        return Verdict(cause_at(_assigned(file, frame, model), why), f"Make the table as large: {code}.")
    node = source.statement(file, adds[-1].lineno)
    made = source.last_assignment(file, frame.f_lineno, model)
    edits = []
    if node is not None and made is not None:
        later = made if made.lineno > node.lineno else node
        same = source.function_at(file, made.lineno) is source.function_at(file, node.lineno)
        edits = [rewrite.after(file, later, code)] if same else []
    fix = f"Let the model's table grow with it: {code}."
    return Verdict(source.cause(file, adds[-1].lineno, why), fix, edits=edits)


def _assigned(file: str, frame: FrameType, name: str) -> Place | None:
    made = source.last_assignment(file, frame.f_lineno, name)
    return source.place(file, made.lineno) if made is not None else None


def _table_made(error: BaseException, words: tuple[str, ...]) -> Place | None:
    """Of a table that a library makes: the setting that gives its size, else the line that asked the library for it."""
    table = next((m for m in values_named(error, "self") if isinstance(m, nn.Embedding)), None)
    born = origin.born_of(table.weight) if table is not None else None
    if table is None or born is None or not source.is_user_file(born.file):
        return None
    return _size_setting(born.file, int(table.num_embeddings), words) or source.place(born.file, born.line)


def _size_setting(file: str, size: int, words: tuple[str, ...]) -> Place | None:
    """Of a table that a library makes: the one keyword of a config, by such a name, that gives this number."""
    found = set()
    for call in source.calls(file):
        named = [k for k in call.keywords if any(word in (k.arg or "") for word in words)]
        for given in named if source.called_name(call).endswith("Config") else ():
            place, value = trace.decided(file, given.value.lineno, given.value)
            if isinstance(value, ast.Constant) and value.value == size:
                found.add(place)
    return found.pop() if len(found) == 1 else None
