"""One entry of the table of known error texts: how it is recognised, why it happens, what to change.

In `text` a blank matches any white space or none, so that a message is found however a log was wrapped; case does not
matter. In `cause` and `fix`, `{a}` and `{b}` are the first two devices named in the quoted text (or, where it names
none, "one device" and "another"), other braces are the named groups of `text`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DEVICE = r"(?:cuda|cpu|mps|xpu|npu|hpu|meta)(?::\d+)?"
"""A device as torch prints it."""

ARGUMENT = r"\(when checking (?:the )?(?:argument|arugment)(?: for argument)?"
"""How torch 1.x and 2.x begin to name the stray operand (1.8 misspelt it)."""

_LABELS = {"text": "text", "only": "only_if", "why": "cause", "fix": "fix"}
_LATE = " (a consequence)"


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


def read_table(table: str) -> tuple[Pattern, ...]:
    """Entries as plain text: a title, and under it `text`, perhaps `only` (`only_if`), `why` (the cause) and `fix`.

    Each may go on over several lines. They are joined by a blank, or after a `|`, where an expression goes on, by none.
    """
    found = []
    for entry in re.split(r"\n(?=\S)", table.strip()):
        title, *lines = entry.splitlines()
        fields: dict[str, Any] = {"consequence": title.endswith(_LATE)}
        name = ""
        for label, said in ((line[2:7].strip(), line[7:]) for line in lines):
            name = _LABELS[label] if label else name
            joint = " " if name in fields and not fields[name].endswith("|") else ""
            fields[name] = fields.get(name, "") + joint + said
        found.append(Pattern(title.removesuffix(_LATE), **fields))
    return tuple(found)
