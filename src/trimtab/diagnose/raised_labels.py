"""Labels that a loss cannot take: float where classes are counted, marks that it does not skip, none at all.

Follows the label from the loss back over the loop's own casts to the data set or collator; fetches no row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

from trimtab.diagnose import holders, rewrite, rows, source, trace
from trimtab.diagnose.finding import Place, cause_at
from trimtab.diagnose.raised_common import called_by, frames_of, known_here, own_frames, values_named
from trimtab.diagnose.rules_common import Verdict

_LOSSES = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
_CASTS = frozenset(("float", "double", "half", "bfloat16"))
_RESHAPE = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "softmax", "size")


def not_whole(error: BaseException) -> Verdict | None:
    """Class labels that are no int64: a cast on the way to the loss, else what the data set keeps."""
    frame = called_by(error, "cross_entropy", "nll_loss")
    target = frame.f_locals.get("target") if frame is not None else None
    if not isinstance(target, torch.Tensor) or target.dtype == torch.int64:
        return None
    kind = str(target.dtype).removeprefix("torch.")
    why = f"the labels are made {kind} here, and the loss counts classes: it wants int64"
    if any(True for _ in _cast_on_the_way(error)):
        return None
    for data in rows.data_sets(error):
        for place, node in _stored(data, target.dtype):
            code = f"{rewrite.operand(node)}.long()"
            edits = [rewrite.in_place_of(place.file, node, code)]
            return Verdict(
                source.cause(place.file, place.line, why), f"Read them as whole numbers: {code}.", edits=edits
            )
    return None


def _cast_on_the_way(error: BaseException) -> Iterator[ast.Call]:
    """Casts to floating point in the functions that the error went through: they, not the data, may be meant."""
    for frame, line in own_frames(error):
        function = source.function_at(frame.f_code.co_filename, line)
        for node in ast.walk(function) if function is not None else ():
            if isinstance(node, ast.Call) and source.called_name(node) in _CASTS:
                yield node


def _stored(data: object, dtype: torch.dtype) -> Iterator[tuple[Place, ast.expr]]:
    """The line that sets the attribute of a data set from which a row's label is taken, if it holds this type."""
    method = rows.method_of_rows(data)
    line = rows.label_line_of(method) if method is not None else None
    node = rows.label_value(line) if line is not None else None
    while isinstance(node, ast.Subscript):
        node = node.value
    owner = source.class_at(line.file, line.line) if line is not None else None
    if line is None or owner is None or not isinstance(node, ast.Attribute) or source.root(node) != "self":
        return
    while not hasattr(data, node.attr) and hasattr(data, "dataset"):
        data = data.dataset
    kept = getattr(data, node.attr, None)
    if not isinstance(kept, torch.Tensor) or kept.dtype != dtype:
        return
    made = source.attribute_assignment(line.file, owner.name, node.attr)
    statement = source.statement(line.file, made) if made is not None else None
    for target, value in source.pairs(statement) if isinstance(statement, ast.Assign) else ():
        if isinstance(target, ast.Attribute) and target.attr == node.attr:
            yield source.place(line.file, value.lineno), value


def skipped(value: int, ignored: int, error: BaseException) -> Verdict | None:
    """Positions to skip are marked by a number that the loss does not skip."""
    why = f"positions to skip are marked {value} here, and the loss skips {ignored} alone"
    place = _loss_made(error)
    losses = [
        call
        for call in (source.call_on(place.file, place.line) if place is not None else ())
        if source.called_name(call) in _LOSSES
    ]
    # A loss that is told what to skip is told the wrong number, whatever marks the labels.
    told = any(source.keyword(call, "ignore_index") is not None for call in losses)
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error))
    for file in files if value < 0 and not told else ():
        nodes = list(dict.fromkeys(_written(file, value)))
        if len(nodes) == 1:
            fix = f"Mark them with {ignored}, or tell the loss: ignore_index={value}."
            edits = [rewrite.in_place_of(file, nodes[0], str(ignored))]
            return Verdict(source.cause(file, nodes[0].lineno, why), fix, edits=edits)
    why = f"labels are {value}, which is no class, and the loss skips {ignored} alone"
    fix = f"Tell the loss to skip it: ignore_index={value}; or mark such positions {ignored}."
    for call in losses:
        if place is not None:
            said = source.keyword(call, "ignore_index")
            edit = (
                rewrite.in_place_of(place.file, said, str(value))
                if said is not None
                else rewrite.add_keyword(place.file, call, "ignore_index", str(value))
            )
            code = rewrite.with_keyword(place.file, call, "ignore_index", str(value))
            return Verdict(cause_at(place, why), f"Tell the loss to skip it: {code}.", edits=[edit])
    return Verdict(cause_at(place, why), fix)


def _written(file: str, value: int) -> Iterator[ast.expr]:
    """The places of a file at which a negative number is given to a call, a list or an entry: to pad or mark with."""
    for node in source.walk(file):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            given = [*node.args, *(k.value for k in node.keywords if k.arg not in ("dim", "axis"))]
            if source.called_name(node) in _RESHAPE:
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
    module = next((m for m in values_named(error, "self") if isinstance(m, nn.Module)), None)
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


def none_given(error: BaseException) -> Verdict | None:
    """A model of a library gives no loss because the program's own collator makes a batch without labels."""
    loaders = known_here(error, lambda value: isinstance(value, DataLoader))
    found = [loader for _, _, loader in loaders]
    for frame in frames_of(error):
        owner = frame.f_locals.get("self")
        kept = vars(owner).values() if owner is not None and hasattr(owner, "__dict__") else ()
        found += [value for value in kept if isinstance(value, DataLoader)]
    for loader in found:
        collate = loader.collate_fn
        code = getattr(collate, "__code__", None) or getattr(type(collate).__call__, "__code__", None)
        if code is None or not source.is_user_file(code.co_filename):
            continue
        file = code.co_filename
        function = source.function_at(file, code.co_firstlineno)
        returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
        if len(returns) != 1 or not isinstance(batch := returns[0], ast.Dict):
            continue
        keys = [k.value if isinstance(k, ast.Constant) else None for k in batch.keys]
        if "input_ids" not in keys or None in keys or set(keys) & {"labels", "label"}:
            continue
        why = "the batch that this makes has no labels, and without them the model gives no loss"
        return Verdict(
            source.cause(file, batch.lineno, why),
            'Add "labels" to it: of a language model the input_ids, with -100 where they are padded.',
        )
    return None


def no_pad_token(error: BaseException) -> Verdict | None:
    """A tokenizer without a pad token: where the program makes it, and the token that it can pad with."""
    for frame, name, _ in known_here(
        error, lambda v: hasattr(v, "pad_token") and bool(getattr(v, "eos_token", None))
    ):
        file = frame.f_code.co_filename
        made = source.last_assignment(file, frame.f_lineno, name)
        if made is not None:
            code = f"{name}.pad_token = {name}.eos_token"
            why = "this tokenizer has no token to pad with, and rows of different length are padded"
            fix = f"Give it one: {code}; mask the labels by position (attention mask), not by the token's id."
            return Verdict(source.cause(file, made.lineno, why), fix, edits=[rewrite.after(file, made, code)])
    return None
