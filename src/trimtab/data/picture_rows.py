"""One's own rows with pictures: which columns they need, how they are recognised, what each makes of a row.

`data.columns` gives a column that a format expects the name that the file has for it. Only values are read here; a
picture is opened when it is checked or trained on.
"""

from __future__ import annotations

from typing import Any

from trimtab.config.schema import DataSettings
from trimtab.data.clean import BadRow, Tally, needed
from trimtab.data.formats import MISSING, Detected, Format, detect, unused_columns, value_of
from trimtab.data.picture_turns import conversation
from trimtab.data.picture_values import Reading, answers_of, pictures_of
from trimtab.data.pictures import Picture, PictureRow, asked
from trimtab.data.read import Row

FORMATS = {
    form.name: form
    for form in (
        Format("messages", ("messages",), ("images", "image")),
        Format("sharegpt", ("conversations",), ("images", "image")),
        Format("question_answer", ("image", "question", "answer")),
        Format("picture_text", ("image", "text")),
    )
}
"""The formats, in the order in which they are tried. `sharegpt` is LLaVA's: `<image>` in the text."""


def read_own(rows: list[Row], data: DataSettings, tally: Tally) -> Reading:
    """How rows of no declared set are read: by their columns."""
    rows = [_as_image_folder(row, data) for row in rows]
    # Where there is a question, a picture with a text would leave it out.
    asks = "question" in rows[0].values or "question" in data.columns
    formats = {name: form for name, form in FORMATS.items() if not (asks and name == "picture_text")}
    found = detect(rows, "auto", data.columns, formats)
    return Reading(
        rows=rows,
        make=lambda row: _made(row, found, data, tally),
        name=found.form.name,
        reason=found.reason,
        unused=unused_columns(rows[0], found.form, data.columns),
    )


def _as_image_folder(row: Row, data: DataSettings) -> Row:
    """`file_name` names the picture in the metadata files of folders, as `datasets` has it."""
    if "file_name" not in row.values or "image" in row.values or "image" in data.columns:
        return row
    if "file_name" in data.columns.values():
        return row
    values = {"image" if name == "file_name" else name: value for name, value in row.values.items()}
    return row._replace(values=values)


def _made(row: Row, found: Detected, data: DataSettings, tally: Tally) -> PictureRow:
    form, mapping = found.form, data.columns

    def value(column: str) -> Any:
        return value_of(row.values, column, mapping)

    def name(column: str) -> str:
        return mapping.get(column, column)

    absent = [name(column) for column in form.required if value(column) is MISSING]
    if absent:
        there = ", ".join(map(str, row.values)) or "none"
        raise BadRow(f"no column {' and '.join(f'`{column}`' for column in absent)} (columns: {there})")
    if form.name in ("messages", "sharegpt"):
        column = form.required[0]
        beside: tuple[Picture, ...] | None = None
        for held in form.optional:
            if value(held) not in (MISSING, None):
                beside = (beside or ()) + pictures_of(value(held), name(held), row, tally)
        return conversation(value(column), name(column), beside, row, tally, marked=form.name == "sharegpt")

    pictures = pictures_of(value("image"), name("image"), row, tally)
    if not pictures:
        raise BadRow(f"`{name('image')}` is {'null' if value('image') is None else 'empty'}")
    if form.name == "picture_text":
        return asked("", (needed(value("text"), name("text"), tally).strip(),), pictures, row.where)
    question = needed(value("question"), name("question"), tally).strip()
    return asked(question, answers_of(value("answer"), name("answer"), tally), pictures, row.where)
