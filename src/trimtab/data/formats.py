"""The row formats: which columns each declares, how a format is detected, and what to say when none fits.

Only looks at column names and kinds; turning rows into conversations is `convert.py`.

When several formats fit, the first in this order is taken, and the report says so:
messages, sharegpt, alpaca, prompt_completion, text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trimtab.data.json_text import BadJson, parse
from trimtab.data.read import Row
from trimtab.errors import RequestError


@dataclass(frozen=True)
class Format:
    """A declared schema: the columns that every row must have, and those that it may have."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


FORMATS = {
    form.name: form
    for form in (
        Format("messages", ("messages",), ("tools",)),
        Format("sharegpt", ("conversations",), ("system", "tools")),
        Format("alpaca", ("instruction", "output"), ("input", "system", "history")),
        Format("prompt_completion", ("prompt", "completion"), ("system", "tools")),
        Format("text", ("text",)),
    )
}

MISSING: Any = object()

_QUESTIONS = ["instruction", "prompt", "question", "query", "problem", "task", "request"]
_QUESTIONS += ["user", "human", "input", "source", "title"]
_ANSWERS = ["output", "completion", "answer", "response", "reply", "solution", "assistant"]
_ANSWERS += ["target", "chosen", "gpt", "summary", "label"]
_TALKS = ["dialog", "dialogue", "chat", "turns"]
_LIKE = {
    "instruction": _QUESTIONS,
    "prompt": _QUESTIONS,
    "output": _ANSWERS,
    "completion": _ANSWERS,
    "messages": ["messages", "conversation", "conversations", *_TALKS, "chosen"],
    "conversations": ["conversations", "conversation", "messages", *_TALKS],
    "text": ["text", "content", "body", "document", "article", "sentence"],
    "image": [
        "image",
        "images",
        "img",
        "picture",
        "pictures",
        "photo",
        "file_name",
        "filename",
        "image_path",
    ],
    "question": [*_QUESTIONS, "q"],
    "answer": [*_ANSWERS, "answers", "labels", "caption", "text", "a"],
}


def value_of(values: Mapping[str, Any], column: str, mapping: Mapping[str, str]) -> Any:
    """The value of a declared column in a row, or MISSING.

    `mapping` is `data.columns`. A name that is no column and has dots is a path: `instances.0.output`.
    """
    actual = mapping.get(column, column)
    if actual in values:
        return values[actual]
    found: Any = values
    for part in actual.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return MISSING
    return found


@dataclass(frozen=True)
class Detected:
    """The format of a source, and the reason that the report gives for it."""

    form: Format
    reason: str


def detect(
    rows: Sequence[Row], wanted: str, mapping: Mapping[str, str], formats: Mapping[str, Format] = FORMATS
) -> Detected:
    """Choose among `formats` by the columns of the first row; `wanted` is data.format."""
    first = rows[0]
    candidates = list(formats.values()) if wanted == "auto" else [formats[wanted]]
    candidates = _that_know(candidates, mapping, wanted)
    for column in mapping:
        if not any(_has(row, column, mapping) for row in rows):
            raise _not_there(first, column, mapping[column])
    fitting = [form for form in candidates if not _missing(first, form, mapping)]
    if not fitting:
        raise _no_format(first, candidates, wanted, mapping)
    form = fitting[0]
    names = ", ".join(_shown(column, mapping) for column in form.columns if _has(first, column, mapping))
    if wanted != "auto":
        return Detected(form, f"data.format={wanted}; columns {names}")
    reason = f"columns {names}"
    if len(fitting) > 1:
        others = ", ".join(other.name for other in fitting[1:])
        reason += f"; {others} would fit too and comes later in the order {', '.join(formats)}"
    return Detected(form, reason)


def check_columns(row: Row, form: Format, first: Row, mapping: Mapping[str, str]) -> None:
    """Every row has the required columns of the one format; else an error that names the odd row."""
    missing = _missing(row, form, mapping)
    if not missing:
        return
    other = next((f.name for f in FORMATS.values() if f is not form and not _missing(row, f, {})), None)
    if other:
        raise RequestError.of(
            f"{row.where}: a {other} row (columns {_there(row)}) among {form.name} rows",
            f"{first.where} set the format to {form.name}, and a source holds rows of one format",
            "keep the formats in separate files and train on one, or convert one of them",
        )
    raise RequestError.of(
        f"{row.where}: no column {_list(_shown(name, mapping) for name in missing)} (columns: {_there(row)})",
        f"the rows are {form.name}, detected from {first.where}; each needs {_list(form.required)}",
        _change(row, [form], mapping),
    )


def unused_columns(row: Row, form: Format, mapping: Mapping[str, str]) -> list[str]:
    """Columns of the row that the format does not read."""
    used = [mapping.get(column, column) for column in form.columns]
    used += [path.split(".")[0] for path in used]
    return [str(name) for name in row.values if name not in used]


def _that_know(candidates: list[Format], mapping: Mapping[str, str], wanted: str) -> list[Format]:
    knowing = [form for form in candidates if all(column in form.columns for column in mapping)]
    if knowing:
        return knowing
    known = sorted({column for form in candidates for column in form.columns})
    for column, actual in mapping.items():
        if column in known:
            continue
        change = f"known here: {', '.join(known)}"
        if actual in known:
            change = f"write it the other way round: data.columns.{actual}={column}"
        elif near := get_close_matches(column, known, n=1):
            change = f"did you mean data.columns.{near[0]}={actual}?"
        whose = "no format has a" if wanted == "auto" else f"{wanted} has no"
        raise RequestError.of(
            f"data.columns.{column}={actual}: {whose} column `{column}`",
            "data.columns maps a column that the format expects to the column that the file has",
            change,
        )
    raise RequestError.of(
        f"data.columns maps {', '.join(mapping)}",
        "no single format has all of these columns",
        "; ".join(f"{form.name} has {', '.join(form.columns)}" for form in candidates),
    )


def _not_there(row: Row, column: str, actual: str) -> RequestError:
    near = get_close_matches(actual, [str(name) for name in row.values], n=1)
    return RequestError.of(
        f"{row.where}: no column `{actual}` (columns: {_there(row)}), nor in any later row",
        f"data.columns.{column}={actual} says that it is there",
        f"set data.columns.{column}={near[0] if near else '<one of these columns>'}",
    )


def _no_format(row: Row, candidates: list[Format], wanted: str, mapping: Mapping[str, str]) -> RequestError:
    needs = ", or ".join(f"{' and '.join(form.required)} ({form.name})" for form in candidates)
    what = f"no format fits its columns ({_there(row)})"
    if len(candidates) == 1:
        absent = _list(_shown(name, mapping) for name in _missing(row, candidates[0], mapping))
        what = f"no column {absent} (columns: {_there(row)})"
    return RequestError.of(f"{row.where}: {what}", f"a row needs {needs}", _change(row, candidates, mapping))


def _change(row: Row, candidates: list[Format], mapping: Mapping[str, str]) -> str:
    """The third part of a column error: the settings that would map this file, when they can be seen."""
    mapped = suggest(row, candidates, mapping)
    if mapped:
        return "set " + " ".join(f"data.columns.{column}={actual}" for column, actual in mapped.items())
    plain = (form for form in candidates if form.name in ("prompt_completion", "question_answer"))
    form = next(plain, candidates[0])
    absent = _missing(row, form, mapping) or list(form.required)
    settings = " ".join(f"data.columns.{column}=<column>" for column in absent)
    return f"name the columns with {settings}, or rename them in the file"


def suggest(row: Row, candidates: Iterable[Format], mapping: Mapping[str, str]) -> dict[str, str]:
    """The mapping that makes a row fit one of the formats, guessed from names and kinds; empty when none does."""
    options: list[tuple[int, dict[str, str]]] = []
    for form in candidates:
        found: dict[str, str] = {}
        taken = {mapping.get(column, column) for column in form.columns if _has(row, column, mapping)}
        for column in _missing(row, form, mapping):
            actual = _column_like(row, column, taken | set(found.values()))
            if actual is None:
                break
            found[column] = actual
        else:
            needed = len(found)
            parents = {actual.rpartition(".")[0] for actual in found.values()} - {""}
            for column in form.optional:
                for parent in parents:
                    path = f"{parent}.{column}"
                    if not _has(row, column, mapping) and value_of(row.values, path, {}) is not MISSING:
                        found[column] = path
            options.append((needed, found))
    if not options:
        return {}
    # Fewest new names first: a file with `prompt` and `response` needs one mapping, not two. Between pairs of
    # equal length prompt_completion is the plainer name for "question" and "answer".
    fewest = min(count for count, _ in options)
    best = [found for count, found in options if count == fewest]
    return next((found for found in best if "prompt" in found), best[0])


def _column_like(row: Row, column: str, taken: set[str]) -> str | None:
    names = {str(name).lower(): str(name) for name in row.values if name not in taken}
    nested = {path.rpartition(".")[2].lower(): path for path in _paths(row.values)}
    for like in _LIKE.get(column, [column]):
        for place in (names, nested):
            actual = place.get(like)
            if actual is not None and _kind_fits(column, value_of(row.values, actual, {})):
                return actual
    for actual in names.values():
        if column in ("messages", "conversations") and _kind_fits(column, row.values[actual]):
            return actual
    near = [names[name] for name in get_close_matches(column, list(names), n=1, cutoff=0.8)]
    return next((actual for actual in near if _kind_fits(column, row.values[actual])), None)


def _kind_fits(column: str, value: Any) -> bool:
    if column in ("messages", "conversations"):
        value = parse_list(value)
        turn = value[0] if isinstance(value, list) and value else None
        key = "role" if column == "messages" else "from"
        return isinstance(turn, Mapping) and key in turn
    if column == "image":
        return value is None or isinstance(value, (str, bytes, Mapping, list))
    return (
        value is None
        or isinstance(value, (str, int, float))
        or (column == "answer" and isinstance(value, list))
    )


def parse_list(value: Any) -> Any:
    """A list that a CSV or a careless writer stored as JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(BadJson):
            return parse(value)
    return value


def _paths(values: Mapping[str, Any]) -> list[str]:
    """Dotted paths one level down: `instances.0.output`."""
    found = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += [f"{name}.{key}" for key in value]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            found += [f"{name}.0.{key}" for key in value[0]]
    return found


def _missing(row: Row, form: Format, mapping: Mapping[str, str]) -> list[str]:
    return [column for column in form.required if not _has(row, column, mapping)]


def _has(row: Row, column: str, mapping: Mapping[str, str]) -> bool:
    return value_of(row.values, column, mapping) is not MISSING


def _shown(column: str, mapping: Mapping[str, str]) -> str:
    return f"{column} (={mapping[column]})" if column in mapping else column


def _there(row: Row) -> str:
    return ", ".join(str(name) for name in row.values) or "none"


def _list(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
