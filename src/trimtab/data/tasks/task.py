"""What a benchmark task is: from a row of its data set to a prompt, its possible answers and the gold one.

Only text: it reads no file, tokenizes nothing and computes no metric. A row that lacks a column, or whose label is
hidden, is an error that names the row; nothing is guessed in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.data.read import Row
from trimtab.errors import RequestError

Kind = Literal["classification", "choice", "answer"]
"""A fixed set of answers; options that differ from row to row; a free answer that the model writes."""

AnyRow = Row | Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One row as the model sees it, and what its answer is judged by."""

    prompt: str
    options: list[str]
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

    def prompt(self, row: AnyRow) -> str:
        return self.render(self._fields(row))

    def options(self, row: AnyRow) -> list[str]:
        return list(self.answers(self._fields(row)))

    def gold(self, row: AnyRow) -> int:
        """The position of the right answer among the options."""
        fields = self._fields(row)
        return self._checked_gold(fields, len(self.answers(fields)))

    def question(self, row: AnyRow) -> Question:
        """All of it at once."""
        fields = self._fields(row)
        options = list(self.answers(fields))
        return Question(
            prompt=self.render(fields),
            options=options,
            gold=self._checked_gold(fields, len(options)),
            where=fields.where,
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

    def _fields(self, row: AnyRow) -> Fields:
        values, where = (row.values, row.where) if isinstance(row, Row) else (row, f"a row of {self.name}")
        if not isinstance(values, Mapping):
            raise RequestError.of(
                f"{where}: a {type(values).__name__}", "a row has named columns", f"needed: {self.columns}"
            )
        names = {}
        for column in self.columns:
            found = next((n for n in column.split("|") if values.get(n) is not None), None)
            if found is None:
                empty = [n for n in column.split("|") if n in values]
                raise RequestError.of(
                    f"{where}: {'null in' if empty else 'no'} column `{column.replace('|', '` or `')}`",
                    f"{self.name} needs {', '.join(c.replace('|', ' or ') for c in self.columns)}; the row has "
                    f"{', '.join(map(str, values)) or 'no columns'}",
                    "rename the columns of the file, or leave the row out",
                )
            names[column.split("|")[0]] = found
        return Fields(values, names, where, self.name)


class Fields:
    """A row's values by the task's own names for the columns; each is checked as it is taken."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str], where: str, task: str) -> None:
        self.values, self.names, self.where, self.task = values, names, where, task

    def __getitem__(self, name: str) -> Any:
        return self.values[self.names.get(name, name)]

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
        value = self[name]
        if isinstance(value, bool) or str(value).strip().lower() in ("true", "false"):
            return int(str(value).strip().lower() == "true")
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
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self._wrong(name, "a number") from None
        if number != number:
            raise self._wrong(name, "a number")
        return number

    def _wrong(self, name: str, wanted: str) -> RequestError:
        column = self.names.get(name, name)
        return RequestError.of(
            f"{self.where}: column `{column}` holds {self.values[column]!r:.80}",
            f"{self.task} needs {wanted} there",
            "correct the row, or leave it out",
        )
