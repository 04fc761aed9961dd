"""What a benchmark has to draw, as plain figures: a report's page draws them. No drawing is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]


@dataclass(frozen=True)
class Lines:
    """One line for each named series of (x, y); `levels` hold all along."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bars:
    """A value for each name; what is not finite was not measured."""

    title: str
    unit: str
    bars: Mapping[str, float]
    note: str = ""


Plot = Lines | Bars
