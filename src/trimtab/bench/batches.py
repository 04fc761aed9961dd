"""Turns whatever a batch is made of into scored examples: token tensors, token lists, plain text, or a mixture.

Everything stays on the CPU; the objective takes it to the model's device. A row that lacks what is needed is an
error that names the row and the keys that it has; nothing is skipped and nothing made up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from trimtab.data.read import Row
from trimtab.data.tasks import Question, Task
from trimtab.errors import RequestError
from trimtab.zeroth.objective import Example
from trimtab.zeroth.tokens import encode_example

IGNORED = -100
"""The label of a token that carries no loss, as in every Hugging Face collator."""

_PROMPT = ("prompt", "text")
_CANDIDATES = ("candidates", "options")


def as_examples(
    batch: Any,
    tokenizer: Any,
    *,
    task: Task | None = None,
    options: Sequence[str] | None = None,
    where: str = "the batch",
) -> list[Example]:
    """The examples of a batch: a mapping of columns, one row, or a list in which every row may be of another kind.

    A row is an `Example`, a `Question`, a row of `task`, or a mapping with `input_ids` (tensor or list; padding is
    told by `attention_mask`) or `prompt`/`text`, and with `candidates`/`options` and `label`, or `answer`, or
    token-wise `labels` in which -100 marks the prompt. `options` serves rows that bring no candidates of their own.
    """
    rows = _rows(batch, task, where)
    if options is None and task is not None and task.kind == "classification":
        options = _fixed_options(task)
    return [
        _example(row, tokenizer, task, options, f"{where}, row {number}")
        for number, row in enumerate(rows, 1)
    ]


def _rows(batch: Any, task: Task | None, where: str) -> Iterable[Any]:
    if isinstance(batch, (Example, Question, Row, str)):
        return [batch]
    if not isinstance(batch, Mapping):
        if not isinstance(batch, Iterable):
            raise RequestError.of(
                f"{where}: a {type(batch).__name__}",
                "a batch is a list of rows, a mapping of columns, or one row",
                "give the rows as a list, each a mapping or a text",
            )
        return list(batch)
    if _is_row(batch, task):
        return [batch]
    lengths = {key: len(value) if hasattr(value, "__len__") else None for key, value in batch.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        shown = ", ".join(f"{key}: {n if n is not None else 'no list'}" for key, n in lengths.items())
        raise RequestError.of(
            f"{where}: its columns are not of one length ({shown or 'there are none'})",
            "a batch of columns has one value for each row in each column",
            "give every column the same number of values, or give a list of rows",
        )
    count = next(iter(lengths.values())) or 0
    return [{key: value[n] for key, value in batch.items()} for n in range(count)]


def _is_row(batch: Mapping[str, Any], task: Task | None) -> bool:
    """Whether a mapping is a single row, not columns: its ids are flat, or its texts are texts."""
    ids = batch.get("input_ids")
    if ids is not None:
        # A tensor and an array know; a list is flat where it holds numbers.
        dimensions = getattr(ids, "ndim", None)
        return dimensions <= 1 if dimensions is not None else all(isinstance(i, Integral) for i in ids)
    names = [*_PROMPT, *(n for c in (task.columns if task else ()) for n in c.split("|"))]
    return any(isinstance(batch.get(name), str) for name in names)


def _example(
    row: Any, tokenizer: Any, task: Task | None, options: Sequence[str] | None, where: str
) -> Example:
    if isinstance(row, Example):
        return row
    place: Row | None = None
    if isinstance(row, Row):
        row, where, place = row.values, row.where, row
    if isinstance(row, Question):
        return encode_example(tokenizer, row.prompt, row.options, row.gold, row.where)
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise RequestError.of(
            f"{where}: a {type(row).__name__}",
            "a row is a mapping with input_ids or a text, or the text itself",
            "pair the tokens with their candidates: {'input_ids': …, 'candidates': […], 'label': …}",
        )
    if row.get("input_ids") is not None:
        return _from_tokens(row, tokenizer, options, where)
    prompt = next((row[name] for name in _PROMPT if isinstance(row.get(name), str)), None)
    if task is not None and "prompt" not in row:
        if place is None:
            file, _, number = where.rpartition(", row ")
            place = Row(dict(row), file, int(number))
        question = task.question(place)
        return encode_example(tokenizer, question.prompt, question.options, question.gold, where)
    if prompt is None:
        raise _missing(row, where, "input_ids, prompt or text")
    candidates = _candidates(row, options, where)
    if all(isinstance(c, str) for c in candidates):
        return encode_example(tokenizer, prompt, candidates, _label(row, len(candidates), where), where)
    return _paired(_ids(tokenizer(prompt)["input_ids"], where), candidates, row, tokenizer, where)


def _from_tokens(
    row: Mapping[str, Any], tokenizer: Any, options: Sequence[str] | None, where: str
) -> Example:
    ids = _ids(row["input_ids"], where)
    real = _real(row, ids, where)
    prompt = [token for token, kept in zip(ids, real, strict=True) if kept]
    labels = row.get("labels")
    if labels is not None and (isinstance(labels, (list, tuple)) or getattr(labels, "ndim", 0) == 1):
        return _teacher_forced(ids, real, _ids(labels, where), where)
    return _paired(prompt, _candidates(row, options, where), row, tokenizer, where)


def _fixed_options(task: Task) -> Sequence[str]:
    from trimtab.data.tasks.task import Fields

    return task.answers(Fields({}, {}, task.name, task.name))


def _teacher_forced(ids: list[int], real: list[bool], labels: list[int], where: str) -> Example:
    if len(labels) != len(ids):
        raise RequestError.of(
            f"{where}: {len(labels)} labels for {len(ids)} input_ids",
            "token-wise labels stand one under each token",
            "give both the same length",
        )
    kept = [(token, label) for token, label, there in zip(ids, labels, real, strict=True) if there]
    first = next((place for place, (_, label) in enumerate(kept) if label != IGNORED), len(kept))
    answer = kept[first:]
    if not first or not answer or any(label != token for token, label in answer):
        raise RequestError.of(
            f"{where}: the labels do not mark an answer at the end",
            f"labels are {IGNORED} over the prompt and the tokens themselves over the answer that follows it",
            "label the answer's tokens alone, and put the prompt before them",
        )
    return Example([token for token, _ in kept[:first]], [[token for token, _ in answer]], 0)


def _paired(
    prompt: list[int], candidates: Sequence[Any], row: Mapping[str, Any], tokenizer: Any, where: str
) -> Example:
    """Tokens as they come; a candidate in words is tokenized by itself."""
    tokens = [
        list(tokenizer(c, add_special_tokens=False)["input_ids"]) if isinstance(c, str) else _ids(c, where)
        for c in candidates
    ]
    if not prompt or not all(tokens):
        raise RequestError.of(
            f"{where}: {'no token in the prompt' if not prompt else 'a candidate without a token'}",
            "a candidate is scored by its tokens, given the prompt's",
            "give at least one token to the prompt and to each candidate",
        )
    return Example(prompt, tokens, _label(row, len(tokens), where))


def _candidates(row: Mapping[str, Any], options: Sequence[str] | None, where: str) -> Sequence[Any]:
    for name in _CANDIDATES:
        if row.get(name) is not None:
            return list(row[name])
    if row.get("answer") is not None:
        return [row["answer"]]
    if options is None:
        raise _missing(row, where, "candidates, options, answer or token-wise labels")
    return options


def _label(row: Mapping[str, Any], count: int, where: str) -> int:
    value = row.get("label", row.get("labels"))
    if value is None:
        if count == 1:
            return 0
        raise _missing(row, where, "label")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # a word; a tensor of several values
        number = math.nan
    if not number.is_integer():
        raise RequestError.of(
            f"{where}: label {str(value)[:60]!r}",
            "a label is the place of the right candidate, counted from 0",
            f"give a whole number from 0 to {count - 1}",
        )
    label = int(number)
    if not 0 <= label < count:
        hidden = "the label is hidden" if label == -1 else f"there are {count} candidates"
        raise RequestError.of(f"{where}: label {label}", hidden, f"give a label from 0 to {count - 1}")
    return label


def _real(row: Mapping[str, Any], ids: list[int], where: str) -> list[bool]:
    if row.get("attention_mask") is None:
        return [True] * len(ids)
    mask = _ids(row["attention_mask"], where)
    if len(mask) != len(ids):
        raise RequestError.of(
            f"{where}: attention_mask has {len(mask)} places, input_ids {len(ids)}",
            "the mask says for each token whether it is padding",
            "give both the same length",
        )
    return [bool(m) for m in mask]


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


def _missing(row: Mapping[str, Any], where: str, wanted: str) -> RequestError:
    return RequestError.of(
        f"{where}: no {wanted}",
        f"its keys are {', '.join(map(str, row)) or 'none'}",
        "add the key, or name the task that the row belongs to",
    )
