"""Indices out of range, which a GPU answers with a device-side assert: which number, in which table, who decided it.

Reads the failing call's own tensors (ids, labels, tables) from the traceback; computes nothing but their extremes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import holders, rewrite, rows, source, trace
from trimtab.diagnose.finding import Place, cause_at
from trimtab.diagnose.raised_common import called_by, frames_of, known_here, own_frames
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin
from trimtab.virtual.tensor import payload_of

_CLASSES = frozenset(("num_labels", "num_classes", "n_classes", "n_labels", "num_class", "classes"))
_LENGTHS = ("position", "length", "ctx", "context", "seq")
_SMALL = (torch.int32, torch.int16, torch.int8, torch.uint8)
_KINDS = ("vocab", "type", "token", "num_embeddings")


def out_of_range(error: BaseException) -> Verdict | None:
    """What was out of range, if the failing call shows it."""
    if (frame := called_by(error, "cross_entropy", "nll_loss")) is not None:
        return _labels(frame, error)
    if (frame := called_by(error, "embedding", "embedding_bag")) is not None:
        return _ids(frame, error)
    return None


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
    if low == high < 0:
        return _skipped(low, int(ignored), error)
    kept = labels[labels != ignored]
    made = rows.label_line(error) or _born(target)
    top = int(kept.max())
    span = f"the labels go from {int(kept.min())} to {top}, the scores have {classes} classes (0 to {classes - 1})"
    if int(kept.min()) > 0 and top == classes:
        fix = "Count the labels from 0: subtract 1 where they are made"
        if made is not None and (node := rows.label_value(made)) is not None:
            text = rewrite.operand(node)
            edits = [rewrite.in_place_of(made.file, node, f"{text} - 1")]
            return Verdict(cause_at(made, span), f"{fix}: {text} - 1.", edits=edits)
        return Verdict(cause_at(made, span), f"{fix} (or make the head one class wider: {top + 1}).")
    wide = _width_setting(classes, error)
    fix = (
        f"Make the head as wide as there are classes ({top + 1} instead of {classes}), or map the labels to 0 … "
        f"{classes - 1}."
    )
    return Verdict(cause_at(wide or made, span), fix)


def _skipped(value: int, ignored: int, error: BaseException) -> Verdict | None:
    """Positions to skip are marked by a number that the loss does not skip."""
    why = f"positions to skip are marked {value} here, and the loss skips {ignored} alone"
    for file in dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error)):
        nodes = list(dict.fromkeys(_written(file, value)))
        if len(nodes) == 1:
            fix = f"Mark them with {ignored}, or tell the loss: ignore_index={value}."
            edits = [rewrite.in_place_of(file, nodes[0], str(ignored))]
            return Verdict(source.cause(file, nodes[0].lineno, why), fix, edits=edits)
    why = f"a label is {value}, and the loss skips {ignored} alone"
    place = _loss_made(error)
    return Verdict(
        cause_at(place, why),
        f"Tell the loss to skip it: ignore_index={value}; or mark such positions {ignored}.",
    )


def _written(file: str, value: int) -> Iterator[ast.expr]:
    """The places of a file at which a negative number is given to a call, a list or an entry: to pad or mark with."""
    for node in source.walk(file):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            given = [*node.args, *(k.value for k in node.keywords if k.arg not in ("dim", "axis"))]
            if source.called_name(node) in (
                "flatten",
                "view",
                "reshape",
                "squeeze",
                "unsqueeze",
                "softmax",
                "size",
            ):
                continue
        elif isinstance(node, ast.List):
            given = node.elts
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Subscript) for t in node.targets):
            given = [node.value]
        for inner in given:
            # A constant of the program's own: `PAD = -1`, given by its name.
            decided = trace.decided(file, inner.lineno, inner)[1] if isinstance(inner, ast.Name) else inner
            if isinstance(decided, ast.UnaryOp) and ast.unparse(decided) == str(value):
                yield decided


def _loss_made(error: BaseException) -> Place | None:
    """The line that made the loss module, else the one that calls the loss."""
    module = next((m for m in _selves(error) if isinstance(m, nn.Module)), None)
    for frame, name, _ in known_here(error, lambda value: value is module and module is not None):
        file = frame.f_code.co_filename
        if (made := source.last_assignment(file, frame.f_lineno, name)) is not None:
            return source.place(file, made.lineno)
    frames = [frame for frame, _ in own_frames(error)]
    for kept in holders.kept_in(lambda value: value is module and module is not None, frames):
        named = holders.source_of(kept.owner)
        line = source.attribute_assignment(*named, kept.name) if named is not None else None
        if named is not None and line is not None:
            return source.place(named[0], line)
    return next((source.place(f.f_code.co_filename, line) for f, line in own_frames(error)), None)


def _selves(error: BaseException) -> Iterator[Any]:
    return (frame.f_locals["self"] for frame in frames_of(error) if "self" in frame.f_locals)


def _width_setting(classes: int, error: BaseException) -> Place | None:
    """The one setting of the program that says how many classes there are, by this number."""
    found = []
    for file in dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error)):
        for call in source.calls(file):
            for given in (k for k in call.keywords if k.arg in _CLASSES):
                place, value = trace.decided(file, given.value.lineno, given.value)
                if getattr(value, "value", None) == classes:
                    found.append(place)
    return found[0] if len(set(found)) == 1 else None


def _ids(frame: FrameType, error: BaseException) -> Verdict | None:
    ids, table = frame.f_locals.get("input"), frame.f_locals.get("weight")
    if not isinstance(ids, torch.Tensor) or not isinstance(table, torch.Tensor) or not ids.numel():
        return None
    values = payload_of(ids)
    low, high, size = int(values.min()), int(values.max()), int(table.shape[0])
    if low < 0:
        if (wrapped := _wrapped(error)) is not None:
            return wrapped
        why = f"an id is {low}, and a table has no such row"
        return Verdict(
            cause_at(_born(ids), why),
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
    made = _table_made(error, _LENGTHS if counts and last > 1 else _KINDS)
    if counts and last > 1:
        why = f"the table has {size} positions, and the rows are {high + 1} long"
        return Verdict(
            cause_at(made or _born(ids), why),
            f"Make the table as long as the rows are ({high + 1}), or cut the rows to {size}: keep the length in one "
            "setting that both read.",
        )
    why = f"the table has {size} rows (ids 0 to {size - 1}), and the largest id is {high}"
    return Verdict(
        cause_at(made or _born(ids), why), f"Give the table at least {high + 1} rows, or correct the ids."
    )


def _wrapped(error: BaseException) -> Verdict | None:
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
    if (
        node is not None
        and made is not None
        and source.function_at(file, made.lineno) is source.function_at(file, node.lineno)
    ):
        later = made if made.lineno > node.lineno else node
        edits = [rewrite.after(file, later, code)]
    return Verdict(
        source.cause(file, adds[-1].lineno, why), f"Let the model's table grow with it: {code}.", edits=edits
    )


def _assigned(file: str, frame: FrameType, name: str) -> Place | None:
    made = source.last_assignment(file, frame.f_lineno, name)
    return source.place(file, made.lineno) if made is not None else None


def _table_made(error: BaseException, words: tuple[str, ...]) -> Place | None:
    """Where the number of rows of the table that was asked was decided: by its constructor's argument."""
    table = next((m for m in _selves(error) if isinstance(m, nn.Embedding)), None)
    born = origin.born_of(table.weight) if table is not None else None
    if table is None or born is None or not source.is_user_file(born.file):
        return None
    for call in source.call_on(born.file, born.line):
        if source.called_name(call) == "Embedding":
            given = source.keyword(call, "num_embeddings") or next(iter(call.args), None)
            if given is not None:
                return trace.decided(born.file, born.line, given)[0]
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


def _born(tensor: torch.Tensor) -> Place | None:
    born = origin.born_of(tensor)
    return source.place(born.file, born.line) if born is not None else None
