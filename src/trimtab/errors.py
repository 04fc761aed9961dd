"""The errors that Trimtab raises on purpose. Each carries the exit code that its verb ends with.

An error text has three parts: what was asked or found, why it cannot work, what to change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

# Control characters but tab and line feed, marks that turn the direction of writing, and halves of characters.
_UNSHOWN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


class TrimtabError(Exception):
    """The work failed: exit code 1."""

    exit_code = 1


class RequestError(TrimtabError):
    """The request itself cannot be met (a setting, a path, a missing column): exit code 2."""

    exit_code = 2

    @classmethod
    def of(cls, found: str, why: str, change: str) -> Self:
        """Compose the usual three-part message."""
        return cls(f"{shown(found)}\n  why: {shown(why)}\n  change: {shown(change)}")


class NoRoomError(RequestError):
    """What was asked for needs more memory than there is."""


def shown(text: str, most: int = 2000) -> str:
    """A text that may hold what a file held, as a message can show it: of bounded length, and without characters that
    steer a terminal or that no encoding can write."""
    text = text if len(text) <= most else f"{text[:most]}…"
    return text if text.isprintable() else _UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first of many names, and how many more there are, as a message shows them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
