"""Checks before a run that the trackers it reports to are installed. It reports nothing itself: transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from trimtab.config.library_names import TRACKERS
from trimtab.errors import RequestError


def check_trackers(names: Sequence[str]) -> None:
    """Raise RequestError for a tracker that is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise RequestError.of(
                f"monitor.report_to: {name}",
                "Trimtab does not know this tracker",
                f"use one of {', '.join(TRACKERS)}, or leave report_to out",
            )
        if not any(find_spec(module) for module in TRACKERS[name]):
            raise RequestError.of(
                f"monitor.report_to: {name}",
                "its package is not installed",
                f"run `pip install {TRACKERS[name][0]}`, or leave it out: metrics.jsonl is always written",
            )
