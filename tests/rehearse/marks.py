"""The marks in the faulty programs: `# where` on a line that fails, `# cause` on a line to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def marked_lines(path: Path, word: str) -> set[int]:
    """The lines of a program whose comment is this word, alone or with others."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {number for number, line in lines if word in line.partition("# ")[2].split(", ")}


def named_lines(report: dict[str, Any], key: str) -> set[int]:
    """The lines that the findings, and those under them, name as where or cause."""
    findings = [one for finding in report["findings"] for one in (finding, *finding["follows"])]
    return {finding[key]["line"] for finding in findings if finding[key]}
