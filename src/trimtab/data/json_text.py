"""Parses JSON that others wrote, and says where it is wrong: not JSON, a key twice, nested too deeply, a number beyond
what any number type holds.

Python's own parser takes the last of two equal keys, gives infinity for 1e400, and ends in a RecursionError over deep
nesting. Nothing is repaired here.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100
"""Levels of lists and objects in one row; a tool's JSON schema has a dozen."""
_MOST_DIGITS = 308
"""More than a floating-point number holds."""
_HUGE = re.compile(r"\d{309}|\d[eE]\+?\d{3}")


class BadJson(ValueError):
    """Why a text is not taken, and where in it that is (from 1 on; the column 0 is not known)."""

    def __init__(self, why: str, line: int = 1, column: int = 0) -> None:
        super().__init__(why)
        self.why, self.line, self.column = why, line, column

    @property
    def told(self) -> str:
        return f"{self.why}, column {self.column}" if self.column else self.why


class _Twice(ValueError):
    """A key that an object has twice."""


def parse(text: str) -> Any:
    """The value that a text holds; BadJson where it holds none, or one that would not be what it says."""
    try:
        value = _decoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.lineno, error.colno) from None
    except _Twice as twice:
        key = str(twice)
        raise BadJson(f"the key {_short(key)} stands twice in one object", *_second(text, key)) from None
    except RecursionError:
        raise BadJson(f"nested deeper than {DEEPEST} levels") from None
    except ValueError as error:  # a number with more digits than Python takes
        raise BadJson(str(error).partition(";")[0]) from None
    if text.count("[") + text.count("{") > DEEPEST and deeper_than(value, DEEPEST):
        raise BadJson(f"nested deeper than {DEEPEST} levels")
    return value


def deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other deeper than that; without recursion."""
    now = [value]
    for _ in range(levels + 1):
        inside: list[Any] = []
        for one in now:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
        now = [one for one in inside if isinstance(one, dict | list)]
        if not now:
            return False
    return True


def _decoder(text: str) -> json.JSONDecoder:
    # Numbers are looked at one by one only where one may be too large.
    return _CAREFUL if _HUGE.search(text) else _PLAIN


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return made


def _int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits ({digits[:20]}…)")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {_short(digits)} is beyond what a number type holds")
    return value


_PLAIN = json.JSONDecoder(object_pairs_hook=_pairs)
_CAREFUL = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_int, parse_float=_float)


def _second(text: str, key: str) -> tuple[int, int]:
    """Line and column where a key that stands twice in one object may stand the second time."""
    written = [
        at.start() for at in re.finditer(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)
    ]
    if len(written) != 2:  # in other objects as well, or escaped
        return 1, 0
    at = written[1]
    return text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1


def _short(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
