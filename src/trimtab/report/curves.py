"""The curves of a run from the rows of its metrics.jsonl, as SVG inside a page. It draws what was logged, nothing else.

A long curve is thinned to what its width can show: of each column of pixels the lowest and the highest point stay, so
that no peak is lost. The caption says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.bench import svg
from trimtab.monitor.wording import count_of
from trimtab.report.frame import drawing
from trimtab.report.run_facts import Row, number

COLUMNS = 300
"""Columns of pixels of a curve; up to twice as many points are drawn as they are."""
_WIDTH, _HEIGHT = 500, 260
_GIB = 2**30
_NO_CURVE = {"step", "time", "epoch", "elapsed_seconds", "num_tokens", "eval_num_tokens"}
_NO_CURVE_ENDINGS = ("_runtime", "_samples_per_second", "_steps_per_second")


@dataclass(frozen=True)
class Series:
    """One line: a name that is logged, how it is called, and the name of its spread."""

    key: str
    name: str
    spread: str = ""
    scale: float = 1.0


@dataclass
class Panel:
    """One drawing."""

    title: str
    unit: str
    series: list[Series] = field(default_factory=list)


def panels(rows: Sequence[Row]) -> tuple[list[Panel], list[Panel]]:
    """What is to be drawn of these rows: the drawings that a reader looks for, and all others that were logged."""
    logged = list(dict.fromkeys(k for row in rows for k, v in row.items() if number(v) is not None))
    first = [p for p in _wanted(logged) if p.series]
    drawn = {k for p in first for s in p.series for k in (s.key, s.spread)}
    if any(key.startswith("memory_bytes/") for key in drawn):
        drawn |= {"memory_bytes", "peak_memory_bytes"}  # of the first device, which has a line already
    rest = [
        Panel(key, key.rpartition("/")[2], _both(key, logged))
        for key in logged
        if key not in drawn and not (key.startswith("eval_") and key.removeprefix("eval_") in logged)
        if not _no_curve(key)
    ]
    return first, rest


def _no_curve(key: str) -> bool:
    return key in _NO_CURVE or key.endswith(_NO_CURVE_ENDINGS)


def _wanted(logged: Sequence[str]) -> Iterable[Panel]:
    yield Panel("Reward", "reward", _both("reward", logged, "reward_std", "mean ± deviation"))
    for key in logged:
        if key.startswith("rewards/") and key.endswith("/mean"):
            name = key.removeprefix("rewards/").removesuffix("/mean")
            spread = f"rewards/{name}/std"
            yield Panel(f"Reward {name}", "reward", _both(key, logged, spread, "mean ± deviation"))
    yield Panel("Loss", "loss", _both("loss", logged))
    yield Panel("Token accuracy", "share", _both("mean_token_accuracy", logged))
    for key in logged:
        own = key.removeprefix("eval_")
        if key != own and own not in ("loss", *logged) and not _no_curve(key):
            yield Panel(f"Held-out {own.replace('_', ' ')}", own, [Series(key, "held out")])
    yield Panel("Learning rate", "learning rate", _some([Series("learning_rate", "train")], logged))
    yield Panel("Gradient norm", "norm", _some([Series("grad_norm", "train")], logged))
    yield Panel("Projected gradient", "slope", _some([Series("projected_gradient", "train")], logged))
    lengths = [Series(f"completions/{name}_length", name) for name in ("mean", "min", "max")]
    yield Panel("Completion length", "tokens", _some(lengths, logged))
    yield Panel("Completions cut at the longest length", "share", _both("completions/clipped_ratio", logged))
    clipped = [Series(f"clip_ratio/{n}_mean", n) for n in ("region", "low", "high")]
    yield Panel("Share of tokens clipped", "share", _some(clipped, logged))
    yield Panel("KL divergence from the reference", "KL", _both("kl", logged))
    yield Panel("Entropy", "nats", _both("entropy", logged))
    yield Panel("Groups whose rewards are all the same", "share", _both("frac_reward_zero_std", logged))
    for what in ("tokens", "steps"):
        pace = _some([Series(f"{what}_per_second", "train")], logged)
        yield Panel(f"Pace in {what}", f"{what} a second", pace)
    yield Panel("Memory", "GiB", _some(_memory(logged), logged))
    busy = [Series(k, k.partition("/")[2]) for k in logged if k.startswith("busy/")]
    yield Panel("Busy share of each device", "share", busy)


def _memory(logged: Sequence[str]) -> list[Series]:
    """Each device of a split model, or the one device."""
    names = [key for key in logged if key.startswith(("memory_bytes/", "peak_memory_bytes/"))]
    found = []
    for key in names or ["memory_bytes", "peak_memory_bytes"]:
        when = "peak" if key.startswith("peak") else "now"
        found.append(Series(key, f"{key.partition('/')[2]} {when}".strip(), scale=1 / _GIB))
    return found


def _both(key: str, logged: Sequence[str], spread: str = "", name: str = "train") -> list[Series]:
    """The figure while training and the same on held-out rows, where they were logged."""
    return _some([Series(key, name, spread), Series(f"eval_{key}", "held out")], logged)


def _some(series: Iterable[Series], logged: Sequence[str]) -> list[Series]:
    return [one for one in series if one.key in logged]


def draw(panel: Panel, rows: Sequence[Row]) -> str:
    """The panel as a figure of the page."""
    lines, bands, told, broken, all_points = {}, {}, 0, 0, 0
    for one in panel.series:
        measured = [(row, value) for row in rows if (value := number(row.get(one.key))) is not None]
        finite = [(float(row["step"]), v * one.scale) for row, v in measured if math.isfinite(v)]
        broken += len(measured) - len(finite)
        lines[one.name] = thin(finite)
        told, all_points = told + len(lines[one.name]), all_points + len(finite)
        around = [
            (float(row["step"]), value - spread, value + spread)
            for row, value in measured
            if one.spread and (spread := number(row.get(one.spread))) is not None
            if math.isfinite(value + spread)
        ]
        if around:
            bands[one.name] = thin_band(around)
    caption = [*(bands if len(lines) == 1 else ()), _last(lines)]
    if told < all_points:
        caption.append(f"{told:,} of {all_points:,} points: the lowest and the highest of each column")
    if broken:
        caption.append(f"{count_of(broken, 'value')} not finite, and so not drawn")
    drawn = svg.line_panel(
        panel.title,
        lines,
        x_label="step",
        y_label=panel.unit,
        width=_WIDTH,
        height=_HEIGHT,
        bands=bands,
        legend=len(lines) > 1,  # one line is what the title and the caption say
    )
    picture = svg.document([drawn], _WIDTH, _HEIGHT)
    return drawing(picture, panel.title, "; ".join(filter(None, caption)))


def _last(lines: Mapping[str, Sequence[svg.Point]]) -> str:
    """The last value of each line, for those who cannot see it or do not want to read it off."""
    ends = {name: points[-1][1] for name, points in lines.items() if points}
    named = (f"{name} {value:.4g}" if len(ends) > 1 else f"{value:.4g}" for name, value in ends.items())
    return f"last: {', '.join(named)}" if ends else ""


def thin(points: Sequence[svg.Point], columns: int = COLUMNS) -> list[svg.Point]:
    """At most the first, the last, and of each column the lowest and the highest; short curves stay whole."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = {0, len(points) - 1}
    for places in _by_column([x for x, _ in points], columns):
        kept |= {min(places, key=lambda n: points[n][1]), max(places, key=lambda n: points[n][1])}
    return [points[n] for n in sorted(kept)]


def thin_band(band: Sequence[svg.Span], columns: int = COLUMNS) -> list[svg.Span]:
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
