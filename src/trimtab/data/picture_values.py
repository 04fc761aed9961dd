"""What the value of a column says: which picture it names or holds, which answers it accepts.

A picture is a path (from the row's file, or absolute), bytes, a `data:` URL or base64 text. Nothing is downloaded and
nothing is opened here; a value that is none of these is a bad row.
"""

from __future__ import annotations

import ast
import base64
import binascii
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trimtab.data.clean import BadRow, Tally, text_of
from trimtab.data.folders import from_folder
from trimtab.data.formats import parse_list
from trimtab.data.pictures import Picture, PictureRow
from trimtab.data.read import Row
from trimtab.data.sources import Cell

# How base64 of PNG, JPEG, GIF, WebP, BMP and TIFF begins. Fewer characters than this are a name, not a picture.
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkqA", "TU0AK")
_SHORTEST_BASE64 = 48

_LONGEST_LIST = 100_000
"""Characters of a list in Python's spelling: answers have a few."""

_INSIDE = ("bytes", "base64", "data", "image", "path", "file_name", "url", "image_url")
"""Where an object keeps its picture: Hugging Face's {bytes, path}, and the parts of messages."""


@dataclass(frozen=True)
class Reading:
    """How the rows of a source are read: as a declared set, or as one of the formats for one's own data."""

    rows: list[Row]
    """The rows, flattened where one held several questions."""
    make: Callable[[Row], PictureRow]
    name: str
    reason: str
    unused: list[str]
    metric: str | None = None


def pictures_of(value: Any, name: str, row: Row, tally: Tally) -> tuple[Picture, ...]:
    """The pictures of a column that may hold one or a list of them; a null is none."""
    value = parse_list(value)
    if value is None or value == "":
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(picture_of(one, name, row, tally) for one in values)


def picture_of(value: Any, name: str, row: Row, tally: Tally) -> Picture:
    """The picture that a value names or holds. `name` is the column, for errors."""
    value = parse_list(value)
    if isinstance(value, Cell):
        return Picture(value, f"{row.where} (`{name}`)")
    if isinstance(value, Mapping):
        found = [value[key] for key in _INSIDE if value.get(key) is not None]
        if not found:
            raise BadRow(
                f"`{name}` is an object without a picture (it has {', '.join(map(str, value)) or 'nothing'})"
            )
        inside = picture_of(found[0], name, row, tally)
        told = value.get("path")
        if isinstance(inside.source, bytes) and isinstance(told, str) and told:
            return Picture(inside.source, f"{row.where} ({told})")
        return inside
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture(bytes(value), f"{row.where} (`{name}`)")
    if not isinstance(value, str):
        what = "null" if value is None else f"a {type(value).__name__}, not a path, bytes or base64"
        raise BadRow(f"`{name}` is {what}")
    text = value.strip()
    if not text:
        raise BadRow(f"`{name}` is empty")
    scheme = text[:12].partition(":")[0].lower()
    if scheme == "data":
        return Picture(_from_data_url(text, name), f"{row.where} (`{name}`)")
    if scheme in ("http", "https", "s3", "gs", "ftp"):
        raise BadRow(f"`{name}` is a {scheme} address; download the pictures and name the files")
    if scheme == "file":
        text = unquote(urlsplit(text).path)
    elif text.startswith(_BASE64_STARTS) and len(text) >= _SHORTEST_BASE64:
        with suppress(binascii.Error):
            return Picture(base64.b64decode("".join(text.split()), validate=True), f"{row.where} (`{name}`)")
    return Picture(_path(text, name, row), f"{row.where} ({text})")


def _from_data_url(text: str, name: str) -> bytes:
    head, comma, data = text.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRow(f"`{name}` is a data: URL without `;base64,`")
    try:
        return base64.b64decode("".join(unquote(data).split()), validate=True)
    except binascii.Error:
        raise BadRow(f"`{name}` is a data: URL whose base64 is broken") from None


def _path(text: str, name: str, row: Row) -> Path:
    if row.folder is None and not (text.startswith("~/") or Path(text).is_absolute()):
        raise BadRow(
            f"`{name}` is a path, and the rows do not come from a local file that it could start from; "
            "copy rows and pictures here, or put the bytes of the pictures into the rows"
        )
    return from_folder(text, row, "picture")


def answers_of(value: Any, name: str, tally: Tally, written: bool = False) -> tuple[str, ...]:
    """All accepted answers, in their order, as often as given. A list is not its text: `["14"]` accepts `14`.

    `written` is for columns that are declared as lists: one stored as text (`['14']`, as CSV has it) is read back.
    """
    listed = _read_back(value, tally) if written else value
    if not isinstance(listed, list):
        listed = [listed]
    texts = []
    for one in listed:
        if isinstance(one, Mapping):  # VQA's {answer, answer_confidence, answer_id}
            if "answer" not in one:
                raise BadRow(f"`{name}` holds an object without `answer`")
            one = one["answer"]
        text = text_of(one, name, tally)
        if text.strip():
            texts.append(text.strip())
    if not texts:
        raise BadRow(f"`{name}` is {'null' if value is None else 'empty'}")
    if len(texts) < len(listed):
        tally.change(f"empty one among several answers in `{name}` left out")
    return tuple(texts)


def _read_back(value: Any, tally: Tally) -> Any:
    if not isinstance(value, str) or not (value.strip().startswith("[") and value.strip().endswith("]")):
        return value
    found = parse_list(value)
    if not isinstance(found, list) and len(value) < _LONGEST_LIST:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = ast.literal_eval(value.strip())
    if isinstance(found, list):
        tally.change("list of answers that was stored as text")
        return found
    return value


def commonest_first(answers: tuple[str, ...]) -> tuple[str, ...]:
    """The same answers, those given most often first: people who were asked disagree, and one is trained on."""
    often = Counter(answers)
    return tuple(sorted(answers, key=lambda answer: -often[answer]))
