"""The errors that Trimtab raises on purpose. Each carries the exit code that its verb ends with.

An error text has three parts: what was asked or found, why it cannot work, what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class TrimtabError(Exception):
    """The work failed: exit code 1."""

    exit_code = 1


class RequestError(TrimtabError):
    """The request itself cannot be met (a setting, a path, a missing column): exit code 2."""

    exit_code = 2

    @classmethod
    def of(cls, found: str, why: str, change: str) -> Self:
        """Compose the usual three-part message."""
        return cls(f"{found}\n  why: {why}\n  change: {change}")


class NoRoomError(RequestError):
    """What was asked for needs more memory than there is."""


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first of many names, and how many more there are, as a message shows them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
