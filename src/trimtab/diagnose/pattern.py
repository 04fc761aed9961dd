"""One entry of the table of known error texts: how it is recognised, why it happens, what to change.

In `text` a blank matches any white space or none, so that a message is found however a log was wrapped; case does not
matter. In `cause` and `fix`, `{a}` and `{b}` are the first two devices named in the quoted text (or, where it names
none, "one device" and "another"), other braces are the named groups of `text`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

DEVICE = r"(?:cuda|cpu|mps|xpu|npu|hpu|meta)(?::\d+)?"
"""A device as torch prints it."""

ARGUMENT = r"\(when checking (?:the )?(?:argument|arugment)(?: for argument)?"
"""How torch 1.x and 2.x begin to name the stray operand (1.8 misspelt it)."""


@dataclass(frozen=True)
class Pattern:
    """A known error text."""

    title: str
    """The kind of finding that it is, and the name of this text: `no-gradient: target-modules`."""
    text: str
    cause: str
    fix: str
    consequence: bool = False
    """What another fault leads to (a time-out on the healthy ranks, say): told last."""
    only_if: str = ""
    """A further expression that must occur somewhere in the text."""

    @property
    def kind(self) -> str:
        """The kind of finding."""
        return self.title.partition(": ")[0]

    @property
    def name(self) -> str:
        """What this entry is called."""
        return self.title.partition(": ")[2]

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled expression."""
        return re.compile(self.text.replace(" ", r"\s*"), re.IGNORECASE)

    @cached_property
    def condition(self) -> re.Pattern[str] | None:
        """The compiled further expression."""
        return re.compile(self.only_if.replace(" ", r"\s*"), re.IGNORECASE) if self.only_if else None
