"""The whole table of known error texts, the most specific entry first within each theme."""

from __future__ import annotations

from trimtab.diagnose.pattern import Pattern
from trimtab.diagnose.patterns_data import DATA_PATTERNS
from trimtab.diagnose.patterns_devices import DEVICE_PATTERNS
from trimtab.diagnose.patterns_libraries import LIBRARY_PATTERNS
from trimtab.diagnose.patterns_machine import MACHINE_PATTERNS
from trimtab.diagnose.patterns_precision import PRECISION_PATTERNS
from trimtab.diagnose.patterns_ranks import RANK_PATTERNS

PATTERNS: tuple[Pattern, ...] = (
    *DEVICE_PATTERNS,
    *PRECISION_PATTERNS,
    *RANK_PATTERNS,
    *MACHINE_PATTERNS,
    *DATA_PATTERNS,
    *LIBRARY_PATTERNS,
)
