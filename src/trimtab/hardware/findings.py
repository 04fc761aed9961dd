"""One line of a doctor's report, and the rule for what may be written in it. It never shows a secret.

A report is made to be pasted into a bug report: secrets, credentials in addresses and user names stay out of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.redaction import without_secrets

Level = Literal["ok", "absent", "note", "bite"]

MARKS: Mapping[Level, str] = {"ok": "✓", "absent": "-", "note": "!", "bite": "✗"}

HIDDEN = "(set, not shown)"


@dataclass(frozen=True)
class Remark:
    """What was found about one thing, and what to do about it."""

    level: Level
    """ok; absent (not there, and not needed); note (worth knowing); bite (a run would fail, hang, or be wrong)."""
    topic: str
    found: str
    change: str = ""
    """What to do; empty when there is nothing to do."""


_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|^AWS_", re.IGNORECASE)
_HOME_OF_ANYONE = re.compile(r"(?<![\w.-])(?:/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s:'\"]+")
_LONGEST = 300


def shown_value(name: str, value: str) -> str:
    """The value of an environment variable as it may be shown."""
    return HIDDEN if _SECRET_NAME.search(name) else scrub(value)


def scrub(text: str) -> str:
    """One line without credentials and user names; a home folder becomes `~`."""
    text = without_secrets(" ".join(text.split()))
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    text = _HOME_OF_ANYONE.sub("~", text)
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or ""
    if len(user) > 2 and user != "root":
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)", "~", text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
