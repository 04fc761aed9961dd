"""Reads one file of rows: JSON, JSON lines, Parquet, CSV or TSV. Each row remembers where it stood.

Knows nothing about formats or training, and never skips a broken line: it names the file and the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.data.json_text import BadJson, parse
from trimtab.data.read_parquet import parquet_items
from trimtab.errors import RequestError, some_of

READERS = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")

# A JSON object with one of these keys is a row by itself, not a wrapper around a list of rows.
_ROW_KEYS = {"messages", "conversations", "instruction", "prompt", "text"}

# Python's csv module refuses fields over 128 KiB unless told otherwise; long documents are longer.
_LONGEST_FIELD = 2**31 - 1

_LONGEST_LINE = 256 << 20
"""Bytes of one line of JSON lines: some pictures as base64 fit, a whole data set in one line does not."""

_PLAIN = json.JSONDecoder()
_BEGIN = re.compile(r"[\s,]*(?=[^\s,\]])")
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class Row(NamedTuple):
    """One record of a file. `unit` and `number` say where it stood: line 7 of a JSONL file, row 7 of a JSON list."""

    values: dict[str, Any]
    file: str
    number: int
    unit: str = "row"
    folder: Path | None = None
    """Where paths in the row start from; None where the row does not come from a file of the user's."""
    roots: tuple[Path, ...] = ()
    """The folders that a path in the row may lead into; none: that where it starts."""

    @property
    def where(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_file(path: Path, shown: str | None = None, most: int | None = None) -> list[Row]:
    """The rows of a file, by its suffix. `shown` is the name that errors use (an `s3://` address, say). `most` spares
    reading what is not wanted where the file lets one stop; more rows than that may come."""
    if shown is None:
        return [row._replace(folder=path.parent) for row in _read(path, str(path), most)]
    return _read(path, shown, most)


def _read(path: Path, shown: str, most: int | None) -> list[Row]:
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise RequestError.of(
            f"{shown}: a file of kind `{suffix or 'no suffix'}`",
            f"Trimtab reads rows from {', '.join(READERS)}",
            "convert the file, or give it the suffix of what it holds",
        )
    _check_file(path, shown)
    try:
        if suffix == ".parquet":
            items = parquet_items(path, shown, most)
            return [_row(item, shown, number, "row") for number, item in enumerate(items, 1)]
        if suffix in (".jsonl", ".ndjson"):
            return _read_jsonl(_lines(path, shown), shown)
        text = decode_text(path.read_bytes(), shown)
    except OSError as error:
        raise RequestError.of(
            f"{shown}: {error.strerror or type(error).__name__}", "the file cannot be read", "check the file"
        ) from None
    if suffix == ".json":
        return _read_json(text, shown)
    return _read_csv(text, shown, "\t" if suffix == ".tsv" else None)


def _check_file(path: Path, shown: str) -> None:
    """A pipe or a device would be waited for, or would never end."""
    if not path.is_file():
        raise RequestError.of(
            f"{shown}: {'not a file' if path.exists() else 'not there'}",
            "rows are read from a file that has an end, not from a pipe or a device",
            "write the rows to a file first",
        )


def _lines(path: Path, shown: str) -> Iterator[str]:
    """The lines of a file, one in memory at a time."""
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            file.seek(0)
            # split("\n"), not splitlines(): U+2028 and the like may stand unescaped inside a JSON string.
            yield from decode_text(file.read(), shown).split("\n")
            return
        file.seek(0)
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise RequestError.of(
                    f"{shown}, line {number}: longer than {_LONGEST_LINE >> 20} MiB",
                    "a line is one row, and no row has so much text",
                    "write one row a line; a single list of rows belongs into a .json file",
                )
            yield decode_text(line, shown, number)


def decode_text(raw: bytes, shown: str, first: int = 1) -> str:
    """UTF-8 with or without a byte order mark; UTF-16 when its mark says so (Windows tools write it). `first` is the
    number of the first line, for errors."""
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return raw.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + first
        if raw.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            raise RequestError.of(
                f"{shown}: a compressed file or an archive",
                "rows are read from files as they are, and nothing is unpacked",
                "unpack it first (gunzip, unzip, zstd -d), and name what was in it",
            ) from None
        raise RequestError.of(
            f"{shown}, line {line}: byte 0x{raw[error.start]:02x} is not {'UTF-16' if utf16 else 'UTF-8'}",
            "text is read as UTF-8 (or UTF-16 with a byte order mark), and nothing is guessed",
            "save the file as UTF-8, e.g. `iconv -f latin1 -t utf-8 FILE`",
        ) from None


def _read_json(text: str, shown: str) -> list[Row]:
    try:
        whole = parse(text)
    except BadJson as error:
        if error.why == "Extra data" and _first_line_is_object(text):
            return _read_jsonl(text.split("\n"), shown)  # JSON lines under a .json name, as many sets come
        if not error.column:
            number, line = _first_bad(text)
            raise _broken(shown, line, error, number) from None
        raise _broken(shown, error.line, error) from None
    if isinstance(whole, dict):
        whole = _list_inside(whole, shown)
    if not isinstance(whole, list):
        raise RequestError.of(
            f"{shown}: holds a {_kind(whole)}",
            "rows are a list of objects",
            "write `[{...}, {...}]` or JSON lines",
        )
    return [_row(item, shown, number, "row") for number, item in enumerate(whole, 1)]


def _list_inside(whole: dict[str, Any], shown: str) -> list[Any]:
    lists = {key: value for key, value in whole.items() if isinstance(value, list)}
    if whole.keys() & _ROW_KEYS or not lists:
        return [whole]
    if len(lists) == 1:
        return next(iter(lists.values()))
    if "samples" in lists:  # as sets of clips call it, with lists of speakers and languages beside it
        return lists["samples"]
    raise RequestError.of(
        f"{shown}: a JSON object with several lists inside ({', '.join(lists)})",
        "it is not clear which of them holds the rows",
        "keep one list in the file, or write one file per list and name it in data.source",
    )


def _first_line_is_object(text: str) -> bool:
    try:
        return isinstance(parse(text.lstrip().split("\n", 1)[0]), dict)
    except BadJson:
        return False


def _read_jsonl(lines: Iterable[str], shown: str) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, 1):
        line = line.strip(" \t\r\n")
        if not line:
            continue
        try:
            item = parse(line)
        except BadJson as error:
            raise _broken(shown, number, error) from None
        rows.append(_row(item, shown, number, "line"))
    return rows


def _read_csv(text: str, shown: str, delimiter: str | None) -> list[Row]:
    if (at := text.find("\0")) >= 0:
        raise RequestError.of(
            f"{shown}, line {text.count(chr(10), 0, at) + 1}: a NUL character",
            "text has none: the file is damaged, of another kind, or UTF-16 without a byte order mark",
            "save the file as UTF-8",
        )
    if delimiter is None:
        # The first of them wins a tie, so a lone column stays a comma.
        delimiter = max(",;\t", key=text.split("\n", 1)[0].count)
    plain = delimiter == "\t" and _plain_quotes(text)
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        lines = io.StringIO(text, newline="")
        quoting: Any = csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL
        return list(_csv_rows(csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True), shown))
    finally:
        csv.field_size_limit(before)


def _plain_quotes(text: str) -> bool:
    """Whether quotes in a tab-separated text are part of its fields, as in GLUE's own files: a field opens with one
    that is not closed where the field ends, and every line has as many fields as the header all the same."""
    lines = [line.rstrip("\r").split("\t") for line in text.split("\n") if line.strip()]
    opened = (field for line in lines for field in line if field.startswith('"'))
    widths = {len(line) for line in lines}
    return any(not _QUOTED.fullmatch(field) for field in opened) and len(widths) == 1 and widths != {1}


def _csv_rows(reader: Any, shown: str) -> Iterator[Row]:
    columns: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise RequestError.of(
                f"{shown}, line {line}: not valid CSV ({error})",
                "a row that cannot be read must not be guessed at",
                "repair the line; a quote inside a quoted field is written twice",
            ) from None
        if fields is None:
            return
        if not fields:
            continue
        if not columns:
            columns = [name.strip() for name in fields]
            if len(set(columns)) < len(columns):
                raise RequestError.of(
                    f"{shown}: the header names a column twice ({_names(columns)})",
                    "one value would hide the other",
                    "rename or remove one of the columns",
                )
            continue
        if len(fields) > len(columns):
            raise RequestError.of(
                f"{shown}, line {line}: {len(fields)} fields under {len(columns)} columns ({_names(columns)})",
                "the delimiter probably stands unquoted inside a text",
                "put double quotes around fields that hold the delimiter",
            )
        padded = fields + [None] * (len(columns) - len(fields))
        yield Row(dict(zip(columns, padded, strict=True)), shown, line, "line")


def _first_bad(text: str) -> tuple[int | None, int]:
    """Which row of a list is not taken, and the line that it begins in; (None, 1) where that cannot be told."""
    if not text.lstrip().startswith("["):
        return None, 1
    at, number = text.index("[") + 1, 0
    while begin := _BEGIN.match(text, at):
        number += 1
        line = text.count("\n", 0, begin.end()) + 1
        try:
            _, at = _PLAIN.raw_decode(text, begin.end())
            parse(text[begin.end() : at])
        except (ValueError, RecursionError):
            return number, line
    return None, 1


def _broken(shown: str, line: int, error: BadJson, row: int | None = None) -> RequestError:
    change = "repair or remove that line"
    if error.why == "Extra data" and error.line == 1:
        change += "; each row has a line of its own, which ends with LF (a CR alone ends none)"
    return RequestError.of(
        f"{shown}, line {line}{f' (row {row})' if row else ''}: not valid JSON ({error.told})",
        "a row that cannot be read must not be guessed at",
        change,
    )


def _row(item: Any, shown: str, number: int, unit: str) -> Row:
    if isinstance(item, dict):
        if odd := [name for name in item if not name.isascii() and not is_text(name)]:
            raise RequestError.of(
                f"{shown}, {unit} {number}: the column {odd[0]!a}",
                "its name holds half of a character, which no text can hold",
                "repair the name",
            )
        return Row(item, shown, number, unit)
    raise RequestError.of(
        f"{shown}, {unit} {number}: a {_kind(item)}",
        "each row is an object with named columns",
        'write it as `{"column": value, ...}`',
    )


def _names(columns: list[str]) -> str:
    return some_of([" ".join(name.split())[:60] for name in columns], 12)


def is_text(text: str) -> bool:
    """Whether a text can be written as one: JSON's escapes can give half of a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    name = type(value).__name__
    return {"str": "text", "dict": "object", "NoneType": "null"}.get(name, name)
