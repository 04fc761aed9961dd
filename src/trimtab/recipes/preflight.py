"""What can be known about a run before its first step, as a report of checks. The checks themselves are a recipe's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import RequestError
from trimtab.placement import Check


@dataclass
class Preflight:
    """The report, with what was loaded for it. A cross ends the run before it has cost anything."""

    checks: list[Check] = field(default_factory=list)
    processor: Any = None
    data: Any = None
    rewards: Any = None

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.ok is False]

    def lines(self) -> list[str]:
        marks = {True: "✓", False: "✗", None: "-"}
        verdict = f"{len(self.failed)} of {len(self.checks)} checks failed" if self.failed else "all clear"
        return [
            f"before training: {verdict}",
            *(f"check {marks[c.ok]} {c.name:<11} {c.detail}" for c in self.checks),
        ]

    def stop_on_failure(self) -> None:
        if self.failed:
            lines = "\n".join(f"  {c.name}: {c.detail}" for c in self.failed)
            raise RequestError(f"the run cannot begin as configured\n{lines}")
