"""Small plots as SVG text: lines over an axis, and bars. No plotting library, no script, no outside font.

It draws what it is given and computes nothing but where things go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f5fa8", "#c8552b", "#3c8d4f", "#7b4fa3", "#b8860b", "#2a9d9d", "#a83264", "#5a6370", "#8c6d46")
_FONT = "font-family='system-ui, sans-serif'"
_INK, _FAINT = "#222", "#ddd"

MOST_MARKS = 100
"""Points of a line up to which each has a mark of its own, which tells its value."""

_TINY = 1e-300
"""Below this a float has no digits to spare for ticks."""

Point = tuple[float, float]
Span = tuple[float, float, float]
"""A place on the x axis, and the range of y there."""


def document(panels: Sequence[str], width: int, height: int, columns: int = 1) -> str:
    """Panels of one size, in rows of `columns`, as a whole SVG file."""
    columns = max(1, min(columns, len(panels)))
    rows = math.ceil(len(panels) / columns) or 1
    inside = "\n".join(
        f"<g transform='translate({n % columns * width} {n // columns * height})'>\n{panel}\n</g>"
        for n, panel in enumerate(panels)
    )
    whole = f"{columns * width} {rows * height}"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {whole}' width='{columns * width}' "
        f"height='{rows * height}' {_FONT} font-size='12'>\n"
        f"<rect width='100%' height='100%' fill='white'/>\n{inside}\n</svg>\n"
    )


def line_panel(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
    width: int = 640,
    height: int = 360,
    colours: Mapping[str, str] | None = None,
    bands: Mapping[str, Sequence[Span]] | None = None,
    legend: bool = True,
) -> str:
    """One line for each named series of (x, y), for a `document`. Points that are not finite are left out.

    `levels` are drawn across as dashed lines, `bands` faintly behind the lines of the same names. Without a `legend`
    the lines have its room.
    """
    levels = levels or {}
    kept = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    spread = {n: sorted(b for b in band if all(map(math.isfinite, b))) for n, band in (bands or {}).items()}
    xs = [x for points in kept.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in kept.values() for _, y in points] + [v for v in levels.values() if math.isfinite(v)]
    ys += [y for band in spread.values() for _, *ends in band for y in ends]
    x_ticks, y_ticks = ticks(min(0.0, *xs), max(xs)), ticks(min(ys or [0.0]), max(ys or [1.0]))
    names = [*kept, *levels]
    aside = min(50 + 7 * max(map(len, names), default=0), width // 2) if legend else 20
    left = max(56, 28 + 7 * max(len(_number(y)) for y in y_ticks))
    right, top, bottom = width - aside, 34, height - 46

    def at(x: float, y: float) -> Point:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    parts = [_text(left, 18, title, weight="bold", size=14)]
    for y in y_ticks:
        _, place = at(x_ticks[0], y)
        parts.append(f"<line x1='{left}' x2='{right}' y1='{place:.1f}' y2='{place:.1f}' stroke='{_FAINT}'/>")
        parts.append(_text(left - 6, place + 4, _number(y), anchor="end"))
    for x in x_ticks:
        place, _ = at(x, y_ticks[0])
        parts.append(_text(place, bottom + 16, _number(x), anchor="middle"))
    parts.append(_text((left + right) / 2, height - 10, x_label, anchor="middle"))
    middle = (top + bottom) / 2
    parts.append(_text(14, middle, y_label, anchor="middle", turn=f"rotate(-90 14 {middle:.1f})"))
    for number, name in enumerate(names):
        colour = (colours or {}).get(name) or COLOURS[number % len(COLOURS)]
        key = top + 8 + 18 * number
        dash = " stroke-dasharray='5 4'" if name in levels and name not in kept else ""
        stroke = f"stroke='{colour}' stroke-width='2' fill='none'{dash}"
        if spread.get(name):
            edge = [at(x, low) for x, low, _ in spread[name]]
            edge += [at(x, high) for x, _, high in reversed(spread[name])]
            parts.append(f"<polygon points='{_places(edge)}' fill='{colour}' fill-opacity='0.15'/>")
        if name in kept:
            values = sorted(kept[name])
            points = [at(*p) for p in values]
            parts.append(f"<polyline points='{_places(points)}' {stroke}/>")
            if len(values) <= MOST_MARKS:
                parts += [_mark(*place, *value, colour) for place, value in zip(points, values, strict=True)]
        elif math.isfinite(levels[name]):
            _, place = at(x_ticks[0], levels[name])
            parts.append(f"<line x1='{left}' x2='{right}' y1='{place:.1f}' y2='{place:.1f}' {stroke}/>")
        if legend:
            parts.append(f"<line x1='{right + 12}' x2='{right + 34}' y1='{key}' y2='{key}' {stroke}/>")
            parts.append(_text(right + 40, key + 4, name))
    return "\n".join(parts)


def bars_plot(title: str, bars: Mapping[str, float], *, unit: str, width: int = 640, note: str = "") -> str:
    """Horizontal bars from 0, each with its name before it and its value behind it."""
    row, left, right, top = 26, 150, width - 90, 40
    height = top + row * len(bars) + (30 if note else 12)
    longest = max((v for v in bars.values() if math.isfinite(v)), default=0.0) or 1.0
    parts = [_text(12, 20, title, weight="bold", size=14)]
    for number, (name, value) in enumerate(bars.items()):
        y = top + row * number
        parts.append(_text(left - 8, y + 13, name, anchor="end"))
        length = (right - left) * max(0.0, value) / longest if math.isfinite(value) else 0.0
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f"<rect x='{left}' y='{y}' width='{length:.1f}' height='{row - 8}' fill='{colour}'/>")
        shown = f"{value:.3g} {unit}" if math.isfinite(value) else "not measured"
        parts.append(_text(left + length + 6, y + 13, shown))
    if note:
        parts.append(_text(12, height - 10, note, size=11))
    return document(["\n".join(parts)], width, height)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`: steps of 1, 2 or 5 times a power of ten.

    A single value is seen against 0: a constant rate of 0.001 would be flat 0 on a scale of ones. So are values that
    differ by rounding alone, between which floats have no room for ticks.
    """
    largest = max(abs(low), abs(high))
    if largest < _TINY:
        low, high = 0.0, 1.0
    elif high / 2 - low / 2 < largest * 1e-9:  # halves: the distance itself may be over what a float holds
        low, high = min(0.0, low), max(0.0, high)
    rough = high / about - low / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _places(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _mark(across: float, down: float, x: float, y: float, colour: str) -> str:
    """A point that tells its value where the pointer rests on it."""
    said = f"<title>{x:g}: {y:.5g}</title>"
    return f"<circle cx='{across:.1f}' cy='{down:.1f}' r='2.5' fill='{colour}'>{said}</circle>"


def _number(value: float) -> str:
    """A tick in as many digits as tell it from its neighbours; n * step may end in a digit that is rounding."""
    if abs(value) >= 10000:
        return f"{value / 1000:,.12g}k"
    return f"{value:.12g}"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 12,
    turn: str = "",
) -> str:
    extra = f" transform='{turn}'" if turn else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-weight='{weight}' font-size='{size}' "
        f"fill='{_INK}'{extra}>{escape(text)}</text>"
    )
