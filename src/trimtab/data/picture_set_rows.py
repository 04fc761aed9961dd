"""Rows of a declared set as questions about pictures: by its columns, a row a question, all that is missing named.

What a set declares is in `picture_sets.py`; nothing is known of any one set here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.data.clean import BadRow, Tally
from trimtab.data.formats import MISSING, parse_list, value_of
from trimtab.data.picture_sets import Columns, PictureSet
from trimtab.data.picture_values import Reading, picture_of
from trimtab.data.pictures import PictureRow, asked
from trimtab.data.read import Row
from trimtab.errors import RequestError


def read_set(
    known: PictureSet, rows: list[Row], mapping: Mapping[str, str], tally: Tally, chosen_by: str
) -> Reading:
    """How the rows of a declared set are read. `mapping` is data.columns, from the set's names to the file's."""
    columns = _naming(known, rows[0], mapping)
    flat = list(_flattened(rows, columns, mapping)) if known.lists else rows

    def make(row: Row) -> PictureRow:
        if isinstance(row.values, _Uneven):
            raise BadRow(row.values.reason)

        def get(column: str) -> Any:
            found = value_of(row.values, column, mapping)
            if found is MISSING:
                there = ", ".join(map(str, row.values)) or "none"
                raise BadRow(f"no column `{mapping.get(column, column)}` (columns: {there})")
            return found

        picture = picture_of(get(columns.image), mapping.get(columns.image, columns.image), row, tally)
        question, answers = known.ask(get, columns, tally)
        return asked(question, answers, (picture,), row.where)

    used = {mapping.get(column, column) for column in columns.all}
    return Reading(
        rows=flat,
        make=make,
        name=known.name,
        reason=f"{chosen_by}; columns {', '.join(mapping.get(c, c) for c in columns.all)}",
        unused=[str(name) for name in rows[0].values if name not in used],
        metric=known.metric,
    )


def _naming(known: PictureSet, first: Row, mapping: Mapping[str, str]) -> Columns:
    declared = {column for columns in known.columns for column in columns.all}
    if unknown := [column for column in mapping if column not in declared]:
        raise RequestError.of(
            f"data.columns.{unknown[0]}={mapping[unknown[0]]}: {known.name} has no column `{unknown[0]}`",
            f"data.columns maps a column of the set ({', '.join(sorted(declared))}) to the column that the file has",
            "correct the name on the left, or leave vision.dataset out to read rows of your own",
        )
    for columns in known.columns:
        if all(value_of(first.values, column, mapping) is not MISSING for column in columns.all):
            return columns
    absent = [c for c in known.columns[0].all if value_of(first.values, c, mapping) is MISSING]
    there = ", ".join(map(str, first.values)) or "none"
    needs = ", or ".join(" and ".join(columns.all) for columns in known.columns)
    settings = " ".join(f"data.columns.{column}=<column>" for column in absent)
    raise RequestError.of(
        f"{first.where}: no column {' and '.join(f'`{c}`' for c in absent)} (columns: {there})",
        f"{known.name} has {needs}",
        f"name the columns with {settings}, or check that the rows are of this set",
    )


class _Uneven(dict[str, Any]):
    """Stands for a row that cannot be flattened, with the reason, so that it is dropped or stops the run as others."""

    reason: str


def _flattened(rows: Iterable[Row], columns: Columns, mapping: Mapping[str, str]) -> Iterable[Row]:
    """A row per question: `x.parquet, row 7, question 2`. The picture is shared, not copied."""
    for row in rows:
        questions, answers = (
            parse_list(value_of(row.values, column, mapping)) for column in (columns.question, columns.answer)
        )
        reason = None
        if not isinstance(questions, list) or not isinstance(answers, list):
            reason = f"`{columns.question}` or `{columns.answer}` is not a list"
        elif len(questions) != len(answers):
            reason = f"{len(questions)} in `{columns.question}` and {len(answers)} in `{columns.answer}`"
        elif not questions:
            reason = f"`{columns.question}` is empty"
        if reason is not None:
            uneven = _Uneven(row.values)
            uneven.reason = reason
            yield row._replace(values=uneven)
            continue
        names = [mapping.get(column, column) for column in (columns.question, columns.answer)]
        for number, pair in enumerate(zip(questions, answers, strict=True), 1):
            values = row.values | dict(zip(names, pair, strict=True))
            yield row._replace(values=values, number=number, unit=f"{row.unit} {row.number}, question")
