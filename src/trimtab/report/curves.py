"""The curves of a run from the rows of its metrics.jsonl: which there are, and what belongs into one chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trimtab.report.charts import Chart, Line, figure
from trimtab.report.run_facts import Row, number

_GIB = 2**30
_MANY = 4
"""Devices of which a chart tells two lines each; of more it would be too many."""
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
    """Each device of a split model, or the one device; of many devices the peaks alone."""
    names = [key for key in logged if key.startswith(("memory_bytes/", "peak_memory_bytes/"))]
    if len(names) > 2 * _MANY:
        names = [key for key in names if key.startswith("peak")]
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
    lines, spreads = [], []
    for one in panel.series:
        measured = [(row, value) for row in rows if (value := number(row.get(one.key))) is not None]
        around = [
            (float(row["step"]), value - spread, value + spread)
            for row, value in measured
            if one.spread and (spread := number(row.get(one.spread))) is not None
        ]
        points = [(float(row["step"]), value * one.scale) for row, value in measured]
        lines.append(Line(one.name, points, around))
        spreads += [one.name] if around else []
    caption = [*(spreads if len(lines) == 1 else ()), _last(lines)]
    return figure(Chart(panel.title, "step", panel.unit, lines), caption)


def _last(lines: Sequence[Line]) -> str:
    """The last value of each line, for those who cannot see it or do not want to read it off."""
    ends = {
        line.name: fine[-1] for line in lines if (fine := [y for _, y in line.points if math.isfinite(y)])
    }
    named = (f"{name} {value:.4g}" if len(ends) > 1 else f"{value:.4g}" for name, value in ends.items())
    return f"last: {', '.join(named)}" if ends else ""
