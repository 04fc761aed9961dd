"""What a benchmark task is: from a row of its data set to a prompt, its possible answers and the gold one.

It reads no file, tokenizes nothing and computes no metric. A row that lacks a column, or whose label is
hidden, is an error that names the row; nothing is guessed in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.data.read import Row
from trimtab.data.tasks.given import Text, lacking, own_answer, own_gold, own_options, own_prompt, rows_of
from trimtab.errors import RequestError

Kind = Literal["classification", "choice", "answer"]
"""A fixed set of answers; options that differ from row to row; a free answer that the model writes."""

CANDIDATES = ("candidates", "options")


@dataclass(frozen=True)
class Question:
    """One row as the model sees it, and what its answer is judged by."""

    prompt: Text
    options: Sequence[Text]
    """The candidates; of a free answer only the reference that training uses."""
    gold: int
    where: str
    """The row's place, for errors."""
    references: tuple[str, ...] = ()
    """Accepted answers, where there can be several (ReCoRD, SQuAD)."""
    value: float | None = None
    """The true score of a regression task (STS-B)."""
    group: str = ""
    """Rows of one group are judged together (the answers to one question of MultiRC)."""

    def __post_init__(self) -> None:
        """Refuse what no tokenizer takes."""
        for text in (self.prompt, *self.options, *self.references):
            if isinstance(text, str) and not _is_whole(text):
                raise RequestError.of(
                    f"{self.where}: {text[:60]!a}",
                    "a text holds half of a surrogate pair (broken Unicode)",
                    "correct the row, or leave it out",
                )


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


AnyRow = Row | Mapping[str, Any] | Question


@dataclass(frozen=True, kw_only=True)
class Task:
    """One benchmark task: where its rows are, how they are put to a model, what it is measured by."""

    name: str
    title: str
    kind: Kind
    columns: tuple[str, ...]
    """Columns that a row must have; `a|b` where data sets name it one way or the other."""
    metrics: tuple[str, ...]
    """Official metrics; the task's score is their mean, as on the GLUE leaderboard."""
    template: str
    """The prompt and its answers as documentation shows them."""
    hub: str
    subset: str | None
    render: Callable[[Fields], str]
    answers: Callable[[Fields], Sequence[str]]
    target: Callable[[Fields], int]
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "validation": "validation"})
    """Our names of the splits to the hub's. All but `train` are evaluated."""
    train_on: Literal["candidates", "answer"] = "candidates"
    """The training loss: cross-entropy over the candidates, or the log-probability of the gold answer alone."""
    regression: bool = False
    """The figure is the expected value over the options 0, 1, …, by their probabilities."""
    accepted: Callable[[Fields], Sequence[str]] | None = None
    grouped_by: Callable[[Fields], str] | None = None

    def prompt(self, row: AnyRow) -> Text:
        return self.question(row).prompt

    def options(self, row: AnyRow) -> list[Text]:
        return list(self.question(row).options)

    def gold(self, row: AnyRow) -> int:
        """The position of the right answer among the options."""
        return self.question(row).gold

    def question(self, row: AnyRow) -> Question:
        """A row as the model sees it, by the task's own columns.

        Where these are not all there, the row may bring its `prompt`, or `input_ids` as a tensor or a list, in place
        of the rendered one, `candidates` (or `options`) in place of the task's, and token-wise `labels` in place of
        both. What it does not bring, the task takes from its columns.
        """
        if isinstance(row, Question):
            return row
        fields = self._fields(row)
        values, where = fields.values, fields.where
        if not fields.complete and (given := own_answer(values, where)) is not None:
            return Question(given[0], [given[1]], 0, where)
        prompt = None if fields.complete else own_prompt(values, where, "prompt")
        options = None if prompt is None else own_options(values, where, *CANDIDATES)
        if prompt is None:
            fields.check_columns()
            prompt = self.render(fields)
        if options is None:
            options = list(self.answers(fields))
            gold = self._checked_gold(fields, len(options))
        else:
            gold = own_gold(values, len(options), where)
        return Question(
            prompt,
            options,
            gold,
            where,
            references=tuple(self.accepted(fields)) if self.accepted else (),
            value=fields.number("label") if self.regression else None,
            group=self.grouped_by(fields) if self.grouped_by else "",
        )

    def _checked_gold(self, fields: Fields, count: int) -> int:
        gold = self.target(fields)
        if not 0 <= gold < count:
            raise RequestError.of(
                f"{fields.where}: label {gold}",
                f"{self.name} has {count} answers here, so labels go from 0 to {count - 1}",
                "check the label column, or leave the row out",
            )
        return gold

    def _fields(self, row: Row | Mapping[str, Any]) -> Fields:
        values, where = (row.values, row.where) if isinstance(row, Row) else (row, f"a row of {self.name}")
        if not isinstance(values, Mapping):
            raise RequestError.of(
                f"{where}: a {type(values).__name__}", "a row has named columns", f"needed: {self.columns}"
            )
        return Fields(values, self.columns, where, self.name)


def questions_of(batch: Any, task: Task | None, where: str = "the batch") -> list[Question]:
    """The questions of a batch: a list of rows, each in any form, a mapping of columns, or a single row."""
    named = [name for column in (task.columns if task else ("text",)) for name in column.split("|")]
    if isinstance(batch, Row | Question):
        batch = [batch]
    rows = rows_of(batch, where, ("prompt", *named))
    return [_question(row, task, where, number) for number, row in enumerate(rows, 1)]


def _question(row: Any, task: Task | None, batch: str, number: int) -> Question:
    if isinstance(row, Question):
        return row
    if isinstance(row, Mapping):
        row = Row(dict(row), batch, number)
    if not isinstance(row, Row):
        raise RequestError.of(
            f"{batch}, row {number}: a {type(row).__name__}",
            "a row is a mapping with input_ids or a text",
            "pair the tokens with their candidates: {'input_ids': …, 'candidates': […], 'label': …}",
        )
    if task is not None:
        return task.question(row)
    values, where = row.values, row.where
    if (given := own_answer(values, where)) is not None:
        return Question(given[0], [given[1]], 0, where)
    prompt = own_prompt(values, where, "prompt", "text")
    if prompt is None:
        raise lacking(values, where, "input_ids, prompt or text")
    options = own_options(values, where, *CANDIDATES)
    if options is None and values.get("answer") is not None:
        options = own_options({"answer": [values["answer"]]}, where, "answer")
    if options is None:
        raise lacking(values, where, "candidates, options, answer or token-wise labels")
    return Question(prompt, options, own_gold(values, len(options), where), where)


class Fields:
    """A row's values by the task's own names for the columns; each is checked as it is taken."""

    def __init__(self, values: Mapping[str, Any], columns: Sequence[str], where: str, task: str) -> None:
        self.values, self.columns, self.where, self.task = values, columns, where, task
        aliases = [column.split("|") for column in columns]
        found = {names[0]: [n for n in names if values.get(n) is not None] for names in aliases}
        self.names = {name: there[0] for name, there in found.items() if there}
        self.complete = len(self.names) == len(columns)
        if "label" not in self.names and values.get("labels") is not None:
            self.names["label"] = "labels"  # as collators call it

    def check_columns(self) -> None:
        """Raise RequestError for the first column that is not there."""
        for column in self.columns:
            self[column.split("|")[0]]

    def __getitem__(self, name: str) -> Any:
        value = self.values.get(self.names.get(name, name))
        if value is not None:
            return value
        column = next((c for c in self.columns if c.split("|")[0] == name), name)
        empty = any(n in self.values for n in column.split("|"))
        raise RequestError.of(
            f"{self.where}: {'null in' if empty else 'no'} column `{column.replace('|', '` or `')}`",
            f"{self.task} needs {', '.join(c.replace('|', ' or ') for c in self.columns)}; the row has "
            f"{', '.join(map(str, self.values)) or 'no columns'}",
            "rename the columns of the file, or leave the row out",
        )

    def get(self, name: str) -> Any:
        """A value that the task can do without."""
        return self.values.get(self.names.get(name, name))

    def text(self, name: str) -> str:
        value = self[name]
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(name, "text")
        return value.strip()

    def texts(self, name: str) -> list[str]:
        """A list of texts; what SQuAD keeps as `{text: […], answer_start: […]}` counts as its list."""
        value = self[name]
        if isinstance(value, Mapping):
            value = value.get("text")
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, Sequence) or not value or not all(isinstance(v, str) and v for v in value):
            raise self._wrong(name, "a list of texts that is not empty")
        return list(value)

    def label(self, name: str = "label") -> int:
        """A whole number of 0 or more. -1 is how the public sets hide the labels of their test split."""
        word = str(self[name]).strip().lower()
        if word in ("true", "false"):
            return int(word == "true")
        number = self.number(name)
        if number == -1:
            raise RequestError.of(
                f"{self.where}: label -1",
                f"the label is hidden, as in the public test split of {self.task}; nothing can be measured on it",
                "evaluate on the validation split",
            )
        if number != int(number):
            raise self._wrong(name, "a whole number")
        return int(number)

    def number(self, name: str) -> float:
        value = self[name]
        with suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
        raise self._wrong(name, "a number")

    def wrong(self, found: str, why: str) -> RequestError:
        """What to raise for a row whose values cannot be so."""
        return RequestError.of(f"{self.where}: {found}", why, "correct the row, or leave it out")

    def _wrong(self, name: str, wanted: str) -> RequestError:
        column = self.names.get(name, name)
        found = f"column `{column}` holds {self.values[column]!r:.80}"
        return self.wrong(found, f"{self.task} needs {wanted} there")
