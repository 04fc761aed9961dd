"""What a rule says about a fault."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.diagnose.finding import Cause


@dataclass
class Verdict:
    """What the rules say."""

    cause: Cause | None = None
    fix: str = ""
    kind: str = ""
    """Another kind than the fault's, when the cause shows one."""
