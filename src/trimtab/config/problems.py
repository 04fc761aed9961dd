"""What is wrong with a request, told all at once: each problem with its key, value, reason and way out.

Never shows a value that may be a secret, and never keeps one: problems hold the text to print, not the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import RequestError
from trimtab.redaction import has_key as has_key
from trimtab.redaction import has_login as has_login
from trimtab.redaction import without_secrets as without_secrets

COMMAND_LINE = "command line"
_LONGEST_VALUE = 60
_LONGEST_NAME = 200
_MOST_BITS = 1024
_SHOWN = 50
"""Problems that a report tells; who has more will not mend them one by one."""
_SECRET_NAME = re.compile(r"token(?!s|iz)|secret|passw|credential|key", re.IGNORECASE)


@dataclass(frozen=True)
class Origin:
    """Where a value was written; `layer` 1 (command line) wins over 0 (file)."""

    place: str
    line: int
    layer: int

    def __str__(self) -> str:
        return self.place if self.layer else f"{self.place}:{self.line}"

    @property
    def phrase(self) -> str:
        return f"on the {self}" if self.layer else f"at {self}"

    @property
    def order(self) -> tuple[int, int]:
        return (self.layer, self.line)


@dataclass(frozen=True)
class Problem:
    """One thing to put right. `value` is the text to show, with secrets already taken out."""

    key: str
    value: str | None
    reason: str
    change: str
    origin: Origin | None = None
    note: str = ""
    """More about the origin: the alias that was written, the other settings that take part."""

    def lines(self, number: int) -> list[str]:
        """The problem as indented lines of the report."""
        label = f"{number:>3}. "
        name = self.key if len(self.key) <= _LONGEST_NAME else self.key[: _LONGEST_NAME - 1] + "…"
        head = name if self.value is None else f"{name} = {self.value}"
        place = "; ".join(part for part in (str(self.origin) if self.origin else "", self.note) if part)
        first = f"{label}{head}   ({place})" if place else f"{label}{head}"
        indent = " " * len(label)
        return [first, f"{indent}{self.reason}", f"{indent}change: {self.change}"]


class ConfigError(RequestError):
    """The settings cannot be used. `problems` holds every fault that was found, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: p.origin.order if p.origin else (2, 0))
        super().__init__("\n".join([_headline(self.problems), *self._body()]))

    def _body(self) -> list[str]:
        told = self.problems[:_SHOWN]
        lines = [line for number, problem in enumerate(told, 1) for line in problem.lines(number)]
        more = len(self.problems) - len(told)
        return [*lines, f"     and {more:,} more"] if more else lines


def _headline(problems: Sequence[Problem]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    places = dict.fromkeys(problem.origin.place for problem in problems if problem.origin)
    where = [f"on the {place}" if place == COMMAND_LINE else f"in {place}" for place in places]
    return " ".join([count, " and ".join(where)]) if where else f"{count} in the settings"


def is_secret(name: str) -> bool:
    """Whether a setting's name says that its value should not be shown."""
    return _SECRET_NAME.search(name) is not None


def show(value: Any, name: str = "") -> str:
    """A value as it would be written in YAML, short, on one line, without secrets."""
    if is_secret(name):
        return "(not shown)"
    text = _plain(value)
    if len(text) > _LONGEST_VALUE:
        text = text[: _LONGEST_VALUE - 1] + "…"
    return text


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(without_secrets(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        # Only the keys: a secret may sit anywhere in a section that we do not know.
        return "{" + ", ".join(f"{_plain(key) if isinstance(key, int) else key}: …" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join("[…]" if isinstance(item, list) else _plain(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"(a number of {value.bit_length():,} bits)"
    return str(value)
