"""The charts of all pages: data that a script in the page draws (assets/chart_*.js), with a table of it.

A long line is thinned to what its width can show: of each column of pixels the lowest and the highest point stay, so
that no peak is lost. The caption says so. Bars need no script. Nothing is measured or judged here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.report.frame import folded, printable, table, text
from trimtab.report.inlined import CHART

COLUMNS = 300
"""Columns of pixels of a line; up to twice as many points are drawn as they are."""
LEGEND = 80
"""Letters of a name that a legend has room for."""
_ROWS = 100
"""Rows of the table behind a chart."""
_MOST = 1e300
"""Beyond this the distance of two numbers may be none."""

Point = tuple[float, float]
Span = tuple[float, float, float]
"""A place on the x axis, and the range of y there."""


@dataclass(frozen=True)
class Line:
    """One line, one area of a stack, or the dots of one kind."""

    name: str
    points: Sequence[Point]
    band: Sequence[Span] = ()
    """A range that is drawn faintly behind it."""
    names: Sequence[str] = ()
    """What each dot stands for."""
    shade: int | None = None
    """The number of its colour; without one, its own among the lines."""


@dataclass(frozen=True)
class Mark:
    """A named place on the x axis."""

    at: float
    name: str


@dataclass(frozen=True)
class Peak:
    """The highest point, and what is written beside it."""

    at: float
    value: float
    text: str


@dataclass(frozen=True)
class Chart:
    """What is drawn: lines, areas that stand on one another, or dots."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    kind: Literal["lines", "stack", "dots"] = "lines"
    levels: Mapping[str, float] = field(default_factory=dict)
    """Values that hold all along."""
    marks: Sequence[Mark] = ()
    peak: Peak | None = None


def figure(chart: Chart, caption: Iterable[str] = ()) -> str:
    """The chart with its caption and, folded, its values; nothing where it has no point."""
    lines, told = [], list(caption)
    kept = all_points = broken = 0
    for line in chart.lines:
        drawable = [_drawable(x) and _drawable(y) for x, y in line.points]
        broken += drawable.count(False)
        if chart.kind == "dots":
            lines.append(line)
            kept += drawable.count(True)
            all_points += drawable.count(True)
            continue
        # Of two points at one place the later one: it was told last.
        points = sorted({x: y for (x, y), fine in zip(line.points, drawable, strict=True) if fine}.items())
        thinned = thin(points) if chart.kind == "lines" else points
        kept, all_points = kept + len(thinned), all_points + len(points)
        band = sorted(span for span in line.band if all(map(_drawable, span)))
        lines.append(Line(short(line.name), thinned, thin_band(band), shade=line.shade))
    if not all_points:
        return bars(chart.title, chart.levels, chart.y)
    if kept < all_points:
        told.append(f"{kept:,} of {all_points:,} points: the lowest and the highest of each column")
    if broken:
        told.append(f"{broken:,} value{'s' * (broken != 1)} not finite, and so not drawn")
    data = _data(chart, lines)
    under = f'<p class="note">{text("; ".join(filter(None, told)))}</p>' if any(told) else ""
    return (
        f'{CHART}<figcaption class="title">{text(short(chart.title))}</figcaption>'
        f"<noscript><p>The chart is drawn by a script; its values stand below.</p></noscript>"
        f'<script type="application/json">{embedded(data)}</script>'
        f"{under}{_values(chart, data)}</figure>"
    )


def bars(title: str, values: Mapping[str, float], unit: str, note: str = "") -> str:
    """Bars from 0, each with its name before it and its value behind it; what is not finite was not measured."""
    if not values:
        return ""
    longest = max((value for value in values.values() if math.isfinite(value)), default=0.0)
    rows = "".join(
        f'<tr><th scope="row">{text(short(name))}</th><td>{length({"": value}, longest)}</td>'
        f"<td>{text(f'{_figure(value)} {unit}' if math.isfinite(value) else 'not measured')}</td></tr>"
        for name, value in values.items()
    )
    under = f'<p class="note">{text(note)}</p>' if note else ""
    return (
        f'<figure class="bars"><figcaption><strong>{text(title)}</strong></figcaption>'
        f"<table>{rows}</table>{under}</figure>"
    )


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def length(parts: Mapping[str, float], longest: float, shades: Mapping[str, int] | None = None) -> str:
    """One bar of parts that follow one another, as a share of the longest; `shades` numbers their colours."""
    drawn = "".join(
        f'<i{_shade(name, shades)} style="width:{100 * value / longest:.2f}%" title="{text(name)}"></i>'
        for name, value in parts.items()
        if longest > 0 and math.isfinite(value) and value > 0
    )
    return f'<div class="length" aria-hidden="true">{drawn}</div>'


def _shade(name: str, shades: Mapping[str, int] | None) -> str:
    return f' class="shade-{shades[name]}"' if shades and name in shades else ""


def short(name: str) -> str:
    """A name that a legend has room for."""
    shown = printable(name[:LEGEND])
    return shown if len(name) <= LEGEND else f"{shown[:-1]}…"


def embedded(data: object) -> str:
    """JSON that may stand inside a page: ASCII, of which nothing begins a tag, a comment or an entity."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(chart: Chart, lines: Sequence[Line]) -> dict[str, Any]:
    """What the script draws: all lines over the same places, with null where a line has no point."""
    if chart.kind == "dots":
        return _dots(chart, lines)
    at = sorted({x for line in lines for x, _ in line.points} | {x for line in lines for x, *_ in line.band})
    series: list[dict[str, Any]] = []
    for line in lines:
        known = dict(line.points)
        one: dict[str, Any] = {"name": line.name, "values": [_round(known.get(x)) for x in at]}
        one |= {} if line.shade is None else {"shade": line.shade}
        if line.band:
            edges = {x: (low, high) for x, low, high in line.band}
            for n, side in enumerate(("low", "high")):
                one[side] = [_round(edges[x][n]) if x in edges else None for x in at]
        series.append(one)
    series += [
        {"name": short(name), "values": [_round(value)] * len(at), "level": True}
        for name, value in chart.levels.items()
        if _drawable(value)
    ]
    return _told(chart, at, series)


def _dots(chart: Chart, lines: Sequence[Line]) -> dict[str, Any]:
    """Dots are not joined, and two may stand at one place: each has a place of its own."""
    found = sorted(
        (x, y, n, short(name))
        for n, line in enumerate(lines)
        for (x, y), name in zip(line.points, line.names or [""] * len(line.points), strict=True)
        if _drawable(x) and _drawable(y)
    )
    series = [
        {"name": short(line.name), "values": [_round(y) if of == n else None for _, y, of, _ in found]}
        for n, line in enumerate(lines)
    ]
    told = _told(chart, [x for x, *_ in found], series)
    return {**told, "names": [name for *_, name in found]}


def _told(chart: Chart, at: Sequence[float], series: list[dict[str, Any]]) -> dict[str, Any]:
    peak = chart.peak
    return {
        "title": short(chart.title),
        "kind": chart.kind,
        "x": chart.x,
        "y": chart.y,
        "at": [_round(x) for x in at],
        "series": series,
        "marks": [{"at": mark.at, "name": short(mark.name)} for mark in chart.marks],
        "peak": {"at": peak.at, "value": peak.value, "text": peak.text} if peak else None,
        "names": None,
    }


def _values(chart: Chart, data: Mapping[str, Any]) -> str:
    """The table behind a chart, for those who do not see it, and where no script runs."""
    at, series = data["at"], data["series"]
    total = [sum(one["values"][n] or 0 for one in series if "level" not in one) for n in range(len(at))]
    judged = total if chart.kind == "stack" else next(one["values"] for one in series)
    chosen = list(range(len(at)))
    if len(at) > _ROWS:
        known = [(float(n), float(judged[n])) for n in chosen if judged[n] is not None]
        chosen = [int(n) for n, _ in thin(known, _ROWS // 2)]
    head = [chart.x, *(one["name"] for one in series)]
    rows = [[_number(at[n]), *(_number(one["values"][n]) for one in series)] for n in chosen]
    if data["names"]:
        head, rows = ["", *head], [[data["names"][n], *row] for n, row in zip(chosen, rows, strict=True)]
    part = f" ({len(chosen):,} of {len(at):,} places)" if len(chosen) < len(at) else ""
    unit = f" in {chart.y}" if chart.y else ""
    return folded(f"Values{unit}{part}", f'<div tabindex="0">{table(head, rows)}</div>')


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.6g}"


def _round(value: float | None) -> float | int | None:
    """Seven digits: more than a pixel or a reader tells apart, and a page that stays small."""
    if value is None:
        return None
    rounded = float(f"{value:.12g}") if abs(value) >= 1e5 else float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _drawable(value: float) -> bool:
    return math.isfinite(value) and abs(value) < _MOST


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """At most the first, the last, and of each column the lowest and the highest; short lines stay whole."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = {0, len(points) - 1}
    for places in _by_column([x for x, _ in points], columns):
        kept |= {min(places, key=lambda n: points[n][1]), max(places, key=lambda n: points[n][1])}
    return [points[n] for n in sorted(kept)]


def thin_band(band: Sequence[Span], columns: int = COLUMNS) -> list[Span]:
    """Of each column the whole range."""
    if len(band) <= 2 * columns:
        return list(band)
    parts = [[band[n] for n in places] for places in _by_column([x for x, *_ in band], columns)]
    return [(part[0][0], min(low for _, low, _ in part), max(high for *_, high in part)) for part in parts]


def _by_column(xs: Sequence[float], columns: int) -> list[list[int]]:
    """Places in the list by the column that they fall into, in order."""
    low, high = min(xs), max(xs)
    width = (high - low) / columns or 1.0
    found: dict[int, list[int]] = {}
    for place, x in enumerate(xs):
        found.setdefault(min(columns - 1, int((x - low) / width)), []).append(place)
    return [found[column] for column in sorted(found)]
