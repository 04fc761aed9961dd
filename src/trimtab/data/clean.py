"""What is wrong with rows, kept as counts: nulls, non-text, empty answers, duplicates, rows that are too long.

A row is never repaired by guessing. What is changed (CRLF, numbers) and what is dropped is counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimtab.data.read import Row, is_text
from trimtab.errors import RequestError, shown

Made = TypeVar("Made")


class BadRow(Exception):
    """This row cannot be trained on; the text is the reason, without the place."""


@dataclass
class Tally:
    """Counts of what happened to rows. `strict` (data.bad_rows=stop) stops at the first bad row instead."""

    strict: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)

    def bad(self, reason: str, where: str) -> None:
        """A row that cannot be trained on."""
        if self.strict:
            raise RequestError.of(
                f"{where}: {reason}",
                "data.bad_rows=stop stops at the first row that cannot be trained on",
                "repair or remove the row, or set data.bad_rows=drop to drop such rows and count them",
            )
        self.drop(reason, where)

    def drop(self, reason: str, where: str) -> None:
        """A row that is dropped whatever `bad_rows` says: duplicates, and what `max_length` cuts away."""
        reason, where = shown(reason, 300), shown(where, 500)
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)

    def change(self, what: str) -> None:
        """A row that is kept, but not as it stood."""
        self.changed[what] += 1

    def reasons(self) -> list[str]:
        """One phrase per reason, most frequent first: `3 empty answer (first: x.jsonl, line 7)`."""
        return [f"{n:,} {reason} (first: {self.first[reason]})" for reason, n in self.dropped.most_common()]


def usable(
    rows: Iterable[Row], make: Callable[[Row], Made], key: Callable[[Made], str], tally: Tally, repeats: bool
) -> Iterator[tuple[Row, Made]]:
    """Each row with what `make` gives for it, but bad ones and (unless `repeats`) those whose key came before."""
    seen: set[str] = set()
    for row in rows:
        try:
            made = make(row)
        except BadRow as bad:
            tally.bad(str(bad), row.where)
            continue
        if not repeats and key(made) in seen:
            tally.drop("repeats an earlier row", row.where)
            continue
        seen.add(key(made))
        yield row, made


def text_of(value: Any, name: str, tally: Tally) -> str:
    """The value as text, or "" for a null. Numbers are written as text and counted; other kinds are bad rows."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        tally.change(f"number in `{name}` written as text")
        return str(value)
    if not isinstance(value, str):
        raise BadRow(f"`{name}` is a {type(value).__name__}, not text")
    if not value.isascii() and not is_text(value):
        half = next(character for character in value if not is_text(character))
        raise BadRow(f"`{name}` holds the half of a character U+{ord(half):04X}")
    if "\r\n" in value:
        tally.change("CRLF line ends inside a text turned into LF")
        return value.replace("\r\n", "\n")
    return value


def needed(value: Any, name: str, tally: Tally) -> str:
    """Text that must not be null, empty or blank."""
    text = text_of(value, name, tally)
    if not text.strip():
        raise BadRow(f"`{name}` is {'null' if value is None else 'empty'}")
    return text
