"""Small files that people or programs wrote, read with care: settings, JSON, templates; bounded in size and depth.

Whatever is wrong with one (a folder, a pipe that nobody writes to, another encoding, cut off, nested without end) is a
`RequestError` with the place. Reads only; never follows what a file says, and never runs any of it.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError

MOST_BYTES = 64 << 20
"""Of a JSON file that is held in memory; a run's own are far below."""
MOST_SETTINGS = 1 << 20
"""Of a file of settings or of a chat template."""
DEEPEST = 100
"""Levels of lists and mappings in one another."""
_PIPE_SECONDS = 10.0
_NULL_DEVICE = (1, 3)
_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The whole file. A pipe is read as well (`<(command)`), where somebody writes to it within some seconds.

    Raises OSError where the system does not give it, and RequestError where it is no file or too big.
    """
    mode = os.stat(path)
    for is_kind, name in _KINDS:
        if is_kind(mode.st_mode) and not _is_null(mode):
            raise RequestError.of(f"{path} is {name}", "a file is read here", "name a file")
    # Not to wait at a pipe that nobody has opened; for a file it makes no difference.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            content = _of_pipe(handle, path, most)
        else:
            with os.fdopen(handle, "rb", closefd=False) as file:
                content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise RequestError.of(
            f"{path} has more than {most:,} bytes",
            "a file of this kind is small, and the whole of it is held in memory",
            "check that this is the file that was meant",
        )
    return content


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The same, as UTF-8 with or without its mark; another encoding is named with the place."""
    content = read_bytes(path, most)
    for mark, name in _ENCODINGS:
        if content.startswith(mark):
            raise _not_text(path, f"is {name} text", "text is read as UTF-8")
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise _not_text(path, f"holds a zero byte in line {line}", "no text has one, but a damaged file may")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        place = f"line {line}, byte {column} of it (byte {error.start} of the file)"
        raise _not_text(path, f"is not UTF-8 text: {place}", "text is read as UTF-8") from None


def read_json(path: Path, what: str, change: str, most: int = MOST_BYTES) -> Any:
    """A JSON file's value. `what` it is and what to `change` where it cannot be read are told with the place."""
    try:
        return parse_json(read_text(path, most))
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError.of(f"{path}: {what} cannot be read", reason, change) from error
    except ValueError as error:
        raise RequestError.of(f"{path}: {what} is not valid JSON", str(error), change) from None


def read_json_object(path: Path, what: str, change: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """The same, of a file that holds one object."""
    content = read_json(path, what, change, most)
    if not isinstance(content, dict):
        held = "nothing (null)" if content is None else f"a {type(content).__name__}"
        raise RequestError.of(f"{path}: {what} holds {held}", "it is one JSON object: {…}", change)
    return content


def parse_json(text: str | bytes, constants: Mapping[str, Any] | None = None) -> Any:
    """The value, or ValueError with the place: also for what is nested too deep, and keys that contradict themselves.

    `constants` says what NaN and the infinities become, which JSON does not have; without it they are floats.
    """
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made and not _same(made[key], value):
                twice.append(key)
            made[key] = value
        return made

    options: dict[str, Any] = {} if constants is None else {"parse_constant": constants.__getitem__}
    try:
        value = json.loads(text, object_pairs_hook=once, **options)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    if twice:
        told = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        raise ValueError(
            f"the key {twice[0][:80]!r} stands twice with different values{_lines_of(twice[0], told)}"
        )
    if deeper_than(value, DEEPEST):
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return value


def deeper_than(value: Any, most: int) -> bool:
    """Whether lists and mappings are in one another more than so many levels deep."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) and type(one) is type(other)
    except RecursionError:
        return False


def _lines_of(key: str, text: str) -> str:
    """Where a key stands, as far as it is written plainly."""
    written = re.compile(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:")
    lines = [text.count("\n", 0, found.start()) + 1 for found in written.finditer(text)][:5]
    return f" (lines {', '.join(map(str, lines))})" if len(lines) > 1 else ""


def _is_null(found: os.stat_result) -> bool:
    """Whether it is /dev/null, which people name for an empty file."""
    return (
        stat.S_ISCHR(found.st_mode)
        and hasattr(os, "major")
        and (os.major(found.st_rdev), os.minor(found.st_rdev)) == _NULL_DEVICE
    )


def _of_pipe(handle: int, path: Path, most: int) -> bytes:
    """What is written to a pipe until its last writer closes it."""
    import select

    content, ends = b"", time.monotonic() + _PIPE_SECONDS
    while len(content) <= most:
        try:
            part = os.read(handle, 1 << 16)
        except BlockingIOError:
            part = None
        if part:
            content += part
            continue
        if part is not None and content:
            return content
        # Nobody writes yet (b""), or somebody has it open and is silent (None).
        left = ends - time.monotonic()
        if left <= 0:
            raise RequestError.of(
                f"{path} is a pipe, and its content did not come within {_PIPE_SECONDS:g} seconds",
                "nobody writes to it, or whoever does has not ended",
                "name a file, or write to the pipe at once: <(command)",
            )
        if part is None:
            select.select([handle], [], [], left)
        else:
            time.sleep(min(0.05, left))
    return content


def _not_text(path: Path, found: str, why: str) -> RequestError:
    return RequestError.of(f"{path} {found}", why, "save the file as UTF-8 text, or name another")
