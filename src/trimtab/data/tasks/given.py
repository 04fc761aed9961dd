"""Rows that bring their own tokens or words: token tensors, token lists, prompts as text, or a mixture of these.

Only forms: it tokenizes nothing. A row that lacks what is needed is an error that names the row and the keys that it
has; nothing is skipped and nothing made up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from trimtab.errors import RequestError

Text = str | list[int]
"""Words, or the ids of their tokens."""

IGNORED = -100
"""The label of a token that carries no loss, as in every Hugging Face collator."""


def own_prompt(row: Mapping[str, Any], where: str, *names: str) -> Text | None:
    """The row's tokens (padding is told by `attention_mask`), else the text under one of these names; None: neither."""
    if row.get("input_ids") is not None:
        return [token for token, there in _tokens(row, where) if there]
    return next((row[name] for name in names if isinstance(row.get(name), str)), None)


def own_answer(row: Mapping[str, Any], where: str) -> tuple[list[int], list[int]] | None:
    """Prompt and answer of a row with token-wise `labels`, in which IGNORED marks the prompt; None: it has none."""
    labels = row.get("labels")
    if row.get("input_ids") is None or not (
        isinstance(labels, list | tuple) or getattr(labels, "ndim", 0) == 1
    ):
        return None
    marks, tokens = _ids(labels, where), _tokens(row, where)
    if len(marks) != len(tokens):
        raise RequestError.of(
            f"{where}: {len(marks)} labels for {len(tokens)} input_ids",
            "token-wise labels stand one under each token",
            "give both the same length",
        )
    kept = [(token, mark) for (token, there), mark in zip(tokens, marks, strict=True) if there]
    first = next((place for place, (_, mark) in enumerate(kept) if mark != IGNORED), len(kept))
    prompt, answer = kept[:first], kept[first:]
    if not prompt or not answer or any(mark != token for token, mark in answer):
        raise RequestError.of(
            f"{where}: the labels do not mark an answer at the end",
            f"labels are {IGNORED} over the prompt and the tokens themselves over the answer that follows it",
            "label the answer's tokens alone, and put the prompt before them",
        )
    return [token for token, _ in prompt], [token for token, _ in answer]


def own_options(row: Mapping[str, Any], where: str, *names: str) -> list[Text] | None:
    """The candidates that a row brings, each as text or as tokens; None where it brings none."""
    found = next((row[name] for name in names if row.get(name) is not None), None)
    if found is None:
        return None
    if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
        raise RequestError.of(
            f"{where}: {str(found)[:60]!a} in place of candidates",
            "a row brings its candidates as a list of texts or of token ids",
            "give a list",
        )
    return [option if isinstance(option, str) else _ids(option, where) for option in found]


def own_gold(row: Mapping[str, Any], count: int, where: str) -> int:
    """The place of the right candidate: `label`, or a single `labels` as collators call it."""
    value = row.get("label", row.get("labels"))
    if value is None:
        if count == 1:
            return 0
        raise lacking(row, where, "label")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a word; a tensor of several values
        number = math.nan
    if not number.is_integer():
        raise RequestError.of(
            f"{where}: label {str(value)[:60]!r}",
            "a label is the place of the right candidate, counted from 0",
            f"give a whole number from 0 to {count - 1}",
        )
    if not 0 <= number < count:
        hidden = "the label is hidden" if number == -1 else f"there are {count} candidates"
        raise RequestError.of(f"{where}: label {int(number)}", hidden, f"give a label from 0 to {count - 1}")
    return int(number)


def rows_of(batch: Any, where: str, text_columns: Iterable[str]) -> list[Any]:
    """The rows of a batch: a list of rows, a mapping of columns, or one row (its ids are flat, its texts are texts)."""
    if not isinstance(batch, Mapping):
        if isinstance(batch, str) or not isinstance(batch, Iterable):
            raise RequestError.of(
                f"{where}: a {type(batch).__name__}",
                "a batch is a list of rows, a mapping of columns, or one row",
                "give the rows as a list, each a mapping",
            )
        return list(batch)
    ids = batch.get("input_ids")
    if ids is not None:
        # A tensor and an array know; a list is flat where it holds numbers.
        dimensions = getattr(ids, "ndim", None)
        single = dimensions <= 1 if dimensions is not None else all(isinstance(i, Integral) for i in ids)
    else:
        single = any(isinstance(batch.get(name), str) for name in text_columns)
    if single:
        return [batch]
    lengths = {key: len(value) if hasattr(value, "__len__") else None for key, value in batch.items()}
    counts = set(lengths.values())
    if len(counts) != 1 or None in counts:
        shown = ", ".join(f"{key}: {n if n is not None else 'no list'}" for key, n in lengths.items())
        raise RequestError.of(
            f"{where}: its columns are not of one length ({shown or 'there are none'})",
            "a batch of columns has one value for each row in each column",
            "give every column the same number of values, or give a list of rows",
        )
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def lacking(row: Mapping[str, Any], where: str, wanted: str) -> RequestError:
    return RequestError.of(
        f"{where}: no {wanted}",
        f"its keys are {', '.join(map(str, row)) or 'none'}",
        "add the key, or name the task that the row belongs to",
    )


def _tokens(row: Mapping[str, Any], where: str) -> Sequence[tuple[int, bool]]:
    """Each token of a row, and whether it is one (not padding)."""
    ids = _ids(row["input_ids"], where)
    mask = [1] * len(ids) if row.get("attention_mask") is None else _ids(row["attention_mask"], where)
    if len(mask) != len(ids):
        raise RequestError.of(
            f"{where}: attention_mask has {len(mask)} places, input_ids {len(ids)}",
            "the mask says for each token whether it is padding",
            "give both the same length",
        )
    return [(token, bool(there)) for token, there in zip(ids, mask, strict=True)]


def _ids(value: Any, where: str) -> list[int]:
    """A flat list of whole numbers, from a tensor on any device, an array or a list."""
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, Iterable) or not all(isinstance(n, Integral) for n in numbers):
        raise RequestError.of(
            f"{where}: no list of whole numbers ({str(numbers)[:60]})",
            "one row is one flat list of token ids",
            "give ids as integers, one list or one-dimensional tensor for each row",
        )
    return [int(n) for n in numbers]
