"""A field that a row or batch lacks: which fields it has, and which of them is likely meant.

Looks at the mapping that the failing line indexes, in the live frame; in a loader's worker that is the worker's own.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from trimtab.diagnose import holders, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.diagnose.raised_common import frames_and_lines, values_named

_SAME = (
    {"question", "query", "prompt", "instruction", "input", "problem", "request", "user"},
    {"answer", "label", "target", "response", "output", "completion", "reply", "solution", "chosen"}
    | {"assistant"},
    {"text", "content", "sentence", "caption", "document", "body", "description", "transcript", "passage"},
    {"image", "picture", "img", "pixel_values", "photo", "pixels", "image_path"},
    {"audio", "speech", "sound", "wav", "waveform", "input_values"},
    {"messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"},
    {"input_ids", "ids", "tokens", "token_ids"},
)
"""Names that data sets give to one thing."""


def explain(finding: Finding, error: BaseException, why: str) -> None:
    """Add to a finding about a missing key what the mapping holds, and name the likely field in cause and fix."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(key, str) or finding.where is None:
        return
    found = next(_mappings(error, finding.where, key), None)
    if found is None:
        return
    name, fields = found
    there = ", ".join(fields[:12]) + (f" and {len(fields) - 12} more" if len(fields) > 12 else "")
    finding.message += f" (the fields that are there: {there})"
    if finding.cause is not None and finding.cause.line != finding.where.line:
        return  # another line took the field away
    meant = likely(key, fields)
    said = f"{name or 'the row'} has the fields {there}, and no {key!r}"
    if meant is not None:
        said += f"; {meant!r} is likely the one that is meant"
        finding.fix = (
            f"read {name or 'row'}[{meant!r}] here, or rename the field once, where the data is loaded "
            f"(dataset.rename_column({meant!r}, {key!r}))"
        )
    finding.cause = cause_at(finding.where, said if meant is not None or not why else f"{said}: {why}")


def likely(key: str, fields: list[str]) -> str | None:
    """The field that a program means by a name that is not there: spelt alike, or another word for the same thing."""
    plain = {_plain(field): field for field in reversed(fields)}
    asked = _plain(key)
    if asked in plain:
        return plain[asked]
    for group in ({_plain(word) for word in words} for words in _SAME):
        if asked in group:
            for name, field in reversed(plain.items()):
                if name in group:
                    return field
    near = difflib.get_close_matches(asked, plain, 1, 0.7)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    """A name without case, joints and plural."""
    bare = "".join(letter for letter in name.lower() if letter.isalnum())
    return bare.removesuffix("s") or bare


def _mappings(error: BaseException, at: Place, key: str) -> Iterator[tuple[str, list[str]]]:
    """What a line asks for a key, with the names that it has: where the source shows it, then any variable that the
    line names, then the table that a library was reading."""
    frame = next(
        (f for f, line in frames_and_lines(error) if (f.f_code.co_filename, line) == (at.file, at.line)), None
    )
    node = source.statement(at.file, at.line)
    if frame is not None and node is not None:
        walked = {
            name.id
            for inner in source.header(node)
            if isinstance(inner, ast.comprehension)
            for name in ast.walk(inner.target)
            if isinstance(name, ast.Name)
        }
        for inner in source.header(node):
            base, asked = _asked(inner)
            if isinstance(asked, ast.Name) and asked.id in walked:
                return  # data are looked up in a table of them, such as the ids of words
            found = holders.value_of(asked, frame) if asked is not None else None
            if base is not None and isinstance(found, str) and found == key:
                yield from _of(base, frame, key)
        for inner in source.header(node):
            value = holders.value_of(inner, frame) if isinstance(inner, ast.Name) else None
            one = value[0] if isinstance(value, list) and value else value
            if fields := _fields(one, key):
                yield ("" if one is not value else ast.unparse(inner)), fields
    for owner in values_named(error, "self"):
        if not isinstance(owner, Mapping) and (fields := _fields(owner, key)):
            yield "", fields


def _of(base: ast.expr, frame: FrameType, key: str) -> Iterator[tuple[str, list[str]]]:
    """The names in what a line indexes, or in the table of which it is a row."""
    if fields := _fields(holders.value_of(base, frame), key):
        yield ast.unparse(base), fields
    elif isinstance(base, ast.Subscript):
        table = holders.value_of(base.value, frame)
        if not isinstance(table, Mapping) and (fields := _fields(table, key)):
            yield ast.unparse(base), fields


def _asked(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """The object and the key of `row[key]`, `row.pop(key)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return node.value, node.slice
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        return (node.func.value, node.args[0]) if node.func.attr == "pop" else (None, None)
    return None, None


def _fields(value: Any, key: str) -> list[str]:
    """The names that a mapping, or a table with named columns, holds; none where it is neither, or has the key."""
    if value is os.environ:
        return []  # no row: its names are the machine's, not the program's
    names = list(value) if isinstance(value, Mapping) else getattr(value, "column_names", None)
    fields = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return fields if key not in fields else []
