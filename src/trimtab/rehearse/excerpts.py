"""The lines around those that a result names, read once while the files are as they ran, so that a page needs none."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from trimtab.diagnose.finding import Finding, Place, place_from

AROUND = 3
_MOST = 200
"""Places of one result."""


def of(
    findings: Iterable[Finding], asked: Iterable[Any], memory: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Lines by file and number. A file that no longer has the line that was seen is left out."""
    found: dict[str, dict[str, str]] = {}
    places = dict.fromkeys(_places(findings, asked, memory))
    for place in islice(places, _MOST):
        lines = linecache.getlines(place.file)
        if not 1 <= place.line <= len(lines) or lines[place.line - 1].strip() != place.code:
            continue
        known = found.setdefault(place.file, {})
        for number in range(max(1, place.line - AROUND), min(len(lines), place.line + AROUND) + 1):
            known[str(number)] = lines[number - 1].rstrip("\r\n")
    return found


def _places(
    findings: Iterable[Finding], asked: Iterable[Any], memory: dict[str, dict[str, Any]]
) -> Iterator[Place]:
    for finding in findings:
        named = (finding.where, finding.cause, finding.library)
        yield from (Place(one.file, one.line, one.code) for one in named if one is not None)
    for told in memory.values():
        peak = told.get("at_peak") or {}
        yield from (one for name in ("where", "inside") if (one := place_from(peak.get(name))) is not None)
    for one in asked:
        yield from (place for place in (one.where, one.inside) if place is not None and one.how != "watch")
