"""Lines of a program on a page, with what stands around them. Reads no file: a record carries the text."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from trimtab.report.frame import cut, prose, text

AROUND = 3
"""Lines before and after the one that is meant."""
Sources = Mapping[str, Mapping[str, str]]
"""Lines of files, by path and number."""
_LONGEST = 400
# Marks that set the words of a line in another order than the one in which they run.
_TURNING = re.compile("[\u202a\u202b\u2066-\u2068]")


def place(where: Mapping[str, Any] | None, sources: Sources) -> str:
    """A line of a program as HTML: its place, and its code with the lines around it where they are known."""
    if not where:
        return ""
    return f"{text(short_path(str(where['file'])))}:{text(where['line'])}{_code(where, sources)}"


def fix_of(value: str) -> str:
    """What is to be changed: code as code, a sentence as one."""
    try:
        ast.parse(textwrap.dedent(value))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return cut(value, shown=prose)
    return f"<code>{cut(value)}</code>"


def short_path(file: str) -> str:
    """A path, of an installed package from its name on."""
    for marker in ("site-packages", "dist-packages"):
        if f"{os.sep}{marker}{os.sep}" in file:
            return file.split(f"{os.sep}{marker}{os.sep}", 1)[1]
    return file


def _code(where: Mapping[str, Any], sources: Sources) -> str:
    known = sources.get(str(where["file"])) or {}
    here = where["line"]
    if isinstance(here, int) and str(here) in known:
        numbers = [n for n in range(here - AROUND, here + AROUND + 1) if str(n) in known]
        shown = textwrap.dedent("\n".join(known[str(n)] for n in numbers)).split("\n")
        lines = [_line(n, line, n == here) for n, line in zip(numbers, shown, strict=True)]
        # The column of the numbers is as wide as the longest; who comes by keyboard is told where they are.
        wide = f'style="--digits:{len(str(numbers[-1]))}"'
        name = text(f"lines of {os.path.basename(str(where['file']))}")
        named = f'role="group" aria-label="{name}"'
        return f'<code class="lines" tabindex="0" {named} {wide}>{"".join(lines)}</code>'
    return f"\n<code>{text(_straight(where['code']))}</code>" if where.get("code") else ""


def _line(number: int, code: str, here: bool) -> str:
    marked = ' class="here"' if here else ""
    shown = text(_straight(code[:_LONGEST])) or " "
    arrow = "→ " if here else ""
    return f"<span{marked}><i>{arrow}{number}</i><b>{shown}</b></span>"


def _straight(code: object) -> str:
    return _TURNING.sub("\N{REPLACEMENT CHARACTER}", str(code))
