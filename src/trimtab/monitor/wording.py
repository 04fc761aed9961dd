"""Durations, sizes and rates as a person reads them. Formats numbers; measures nothing."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """About two significant figures: `12 ms`, `3.1 s`, `41 s`, `6 min`, `2 h 5 min`."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "under 1 ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def clock(seconds: float) -> str:
    """`4:10`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: int) -> str:
    """`640 MiB`, `3.4 GiB`."""
    mebibytes = count / 2**20
    if mebibytes < 1000:
        return f"{mebibytes:.0f} MiB"
    return f"{mebibytes / 1024:.1f} GiB"


def rate(per_second: float, unit: str) -> str:
    """`1,240 tokens/s`, `0.4 steps/s`."""
    number = f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
    return f"{number} {unit}/s"


def count_of(number: int, noun: str) -> str:
    """`1 step`, `20 steps`, `1,200 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
