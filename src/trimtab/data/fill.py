"""Templates over the columns of a row: `{column}` stands for its text. Nothing but names may stand in the braces."""

from __future__ import annotations

from string import Formatter
from typing import Any

from trimtab.data.clean import BadRow
from trimtab.data.read import Row
from trimtab.errors import RequestError


def check_braces(setting: str, template: str) -> None:
    """Refuse a template that cannot be filled, before a row is read."""
    why = "between braces stands the name of a column, and nothing else"
    try:
        names = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
        if all(name and not form and not conversion for name, form, conversion in names):
            return
    except ValueError as error:
        why = str(error)
    raise RequestError.of(
        f"{setting}={template!r}: its braces cannot be read",
        why,
        "write {column}; {{ and }} stand for themselves",
    )


def fill(template: str, row: Row) -> str:
    """The template with the row's values in the place of names."""
    parts = Formatter().parse(template)
    return "".join(text + ("" if name is None else str(column(row, name))) for text, name, _, _ in parts)


def column(row: Row, name: str) -> Any:
    """What a column holds; a row without it, or with nothing in it, is a bad one."""
    value = row.values.get(name)
    if value is None or value == "":
        raise BadRow(f"{'nothing in' if name in row.values else 'no'} column `{name}`")
    return value
