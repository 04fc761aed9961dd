"""Rows that cannot become one batch: the loader or trainer that was given no collator, and one that would do.

The rows themselves are in the failing frames; what they hold decides what a collator has to do with them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimtab.diagnose import rewrite, rows, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import frames_of, known_here, own_frames
from trimtab.diagnose.rules_common import Verdict

_DEFAULTS = frozenset(("default_collate", "default_convert", "default_data_collator", "DefaultDataCollator"))


def unequal(error: BaseException) -> Verdict | None:
    """Rows of different length, and nobody pads them."""
    if (found := _batch(error)) is None:
        return None
    collator, batch = found
    if (verdict := _trainer(error, batch)) is not None:
        return verdict
    if not _is_default(collator):
        return None
    if (site := _loader(error)) is None:
        return None
    file, call = site
    why = "rows of different length are stacked: this loader has no collate_fn that pads them"
    ready = _collator_at_hand(file)
    code = ready or _padding(batch)
    if code is None:
        return Verdict(
            source.cause(file, call.lineno, why), "Give the loader a collate_fn that pads the rows."
        )
    given = source.keyword(call, "collate_fn")
    edits = (
        [rewrite.in_place_of(file, given, code)]
        if given is not None
        else [rewrite.add_keyword(file, call, "collate_fn", code)]
    )
    fits = ready is not None or "torch" in _imported(file)
    return Verdict(
        source.cause(file, call.lineno, why),
        f"Pad in the loader: collate_fn={code}.",
        edits=edits if fits else [],
    )


def missing_row(error: BaseException) -> Verdict | None:
    """A row is None: the data set gives it for what could not be read, and the default collator takes only values."""
    if (
        (found := _batch(error)) is None
        or not _is_default(found[0])
        or not any(row is None for row in found[1])
    ):
        return None
    if (site := _loader(error)) is None:
        return None
    file, call = site
    code = "lambda rows: torch.utils.data.default_collate([row for row in rows if row is not None])"
    given = next((m for data in rows.data_sets(error) if (m := rows.method_of_rows(data))), None)
    line = f" (line {nones[0]} of the data set)" if given and (nones := list(_nones(given))) else ""
    return Verdict(
        source.cause(
            file, call.lineno, f"a row is None{line}, and this loader puts rows together as they are"
        ),
        f"Leave such rows out, in the data set or here: collate_fn={code}.",
        edits=[rewrite.add_keyword(file, call, "collate_fn", code)] if "torch" in _imported(file) else [],
    )


def _nones(method: Place) -> Iterator[int]:
    function = source.function_at(method.file, method.line)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Return) and (node.value is None or source.is_constant(node.value, None)):
            yield node.lineno


def _batch(error: BaseException) -> tuple[Any, Sequence[Any]] | None:
    """The collator of the failing fetch, and the rows that it was given."""
    for frame in frames_of(error):
        fetcher, data = frame.f_locals.get("self"), frame.f_locals.get("data")
        if fetcher is not None and hasattr(fetcher, "collate_fn") and isinstance(data, list) and data:
            return fetcher.collate_fn, data
    return None


def _is_default(collator: Any) -> bool:
    # transformers wraps a collator to drop columns.
    inner = getattr(collator, "data_collator", collator)
    return getattr(inner, "__name__", type(inner).__name__) in _DEFAULTS


def _trainer(error: BaseException, batch: Sequence[Any]) -> Verdict | None:
    """A trainer that was given no collator of its own, and no tokenizer to make one with."""
    owners = (frame.f_locals.get("self") for frame in frames_of(error))
    trainer = next((o for o in owners if hasattr(o, "data_collator") and hasattr(o, "train_dataset")), None)
    if trainer is None or not _is_default(trainer.data_collator):
        return None
    sites = [
        (file, call)
        for file in dict.fromkeys(f.f_code.co_filename for f, _ in own_frames(error))
        for call in source.calls(file)
        if source.called_name(call).endswith("Trainer") and source.keyword(call, "train_dataset") is not None
    ]
    if len(sites) != 1:
        return None
    file, call = sites[0]
    columns = set(batch[0]) if isinstance(batch[0], dict) else set()
    listed = isinstance(batch[0].get("labels"), list) if columns else False
    kind = "DataCollatorForSeq2Seq" if listed else "DataCollatorWithPadding"
    if not columns & {"labels", "label"}:
        kind = "DataCollatorForLanguageModeling"
    found = next(known_here(error, lambda v: hasattr(v, "pad") and hasattr(v, "convert_ids_to_tokens")), None)
    name = found[1] if found is not None else "tokenizer"
    code = f"{kind}({name}, mlm=False)" if kind == "DataCollatorForLanguageModeling" else f"{kind}({name})"
    in_scope = kind in _imported(file) and found is not None
    why = "the rows differ in length, and this trainer has no collator that pads them"
    return Verdict(
        source.cause(file, call.lineno, why),
        f"Give it one that does: data_collator={code} (from transformers), or pad every row to max_length.",
        edits=[rewrite.add_keyword(file, call, "data_collator", code)] if in_scope else [],
    )


def _loader(error: BaseException) -> tuple[str, ast.Call] | None:
    """The call that made the loader: of the name that the failing loop runs over, else the only one of the program."""
    for frame, line in own_frames(error):
        file = frame.f_code.co_filename
        node = source.statement(file, line)
        for name in sorted(source.names_in(getattr(node, "iter", None) or node)) if node is not None else ():
            made = source.last_assignment(file, line, name)
            value = source.value_for(made, name) if made is not None else None
            if isinstance(value, ast.Call) and source.called_name(value) == "DataLoader":
                return file, value
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error))
    calls = [(file, call) for file in files for call in source.calls(file, "DataLoader")]
    return calls[0] if len(calls) == 1 else None


def _collator_at_hand(file: str) -> str | None:
    """A collate function that the file defines and gives to no loader."""
    names = [
        n.name for n in source.walk(file) if isinstance(n, ast.FunctionDef) and "collate" in n.name.lower()
    ]
    module = source.tree(file)
    top = [n.name for n in module.body if isinstance(n, ast.FunctionDef)] if module is not None else []
    free = [name for name in names if name in top]
    return free[0] if len(free) == 1 else None


def _imported(file: str) -> set[str]:
    nodes = [n for n in source.walk(file) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


def _padding(batch: Sequence[Any]) -> str | None:
    """A collator for rows of this form, as an expression."""
    first = batch[0]
    if isinstance(first, dict):
        parts = {key: _part([row[key] for row in batch], f"row[{key!r}]") for key in first}
        if None in parts.values():
            return None
        return "lambda rows: {" + ", ".join(f"{key!r}: {part}" for key, part in parts.items()) + "}"
    if isinstance(first, tuple | list):
        columns = [_part([row[n] for row in batch], f"row[{n}]") for n in range(len(first))]
        if None in columns:
            return None
        return f"lambda rows: ({', '.join(str(column) for column in columns)})"
    part = _part(list(batch), "row")
    return f"lambda rows: {part}" if part is not None else None


def _part(values: list[Any], name: str) -> str | None:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if len({tuple(value.shape) for value in values}) == 1:
            return f"torch.stack([{name} for row in rows])"
        if len({tuple(value.shape[1:]) for value in values}) == 1:
            return f"torch.nn.utils.rnn.pad_sequence([{name} for row in rows], batch_first=True)"
        return None
    if isinstance(first, bool | int | float):
        return f"torch.tensor([{name} for row in rows])"
    if isinstance(first, list) and first and isinstance(first[0], int | float):
        return f"torch.nn.utils.rnn.pad_sequence([torch.tensor({name}) for row in rows], batch_first=True)"
    # What describes a row on its own (the boxes of a picture) stays a list; so do words.
    return f"[{name} for row in rows]" if isinstance(first, str | dict) else None
