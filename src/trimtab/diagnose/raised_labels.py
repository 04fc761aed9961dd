"""Labels that a loss cannot take: float where classes are counted, or none at all. Which line of the data made them.

Follows the label from the loss back over the loop's own casts to the data set or collator; fetches no row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from trimtab.diagnose import rewrite, rows, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import called_by, frames_of, known_here, own_frames
from trimtab.diagnose.rules_common import Verdict

_CASTS = frozenset(("float", "double", "half", "bfloat16"))


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
