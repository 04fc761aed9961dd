"""The rows that a rehearsal of shapes evaluates on: one batch for each process, of the longest.

More of them would make no loss any truer, as none is computed, and no other batch takes more memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def evaluated(rows: Any, a_process: int, processes: int) -> Any:
    """The longest of the held-out rows, as many as one batch takes; all where nothing tells how long they are."""
    count = a_process * processes
    if rows is None or len(rows) <= count:
        return rows
    if not isinstance(rows[0], Mapping) or "input_ids" not in rows[0]:
        return rows
    lengths = [len(row["input_ids"]) for row in rows]
    longest = sorted(range(len(lengths)), key=lambda place: -lengths[place])[:count]
    return rows.select(longest) if hasattr(rows, "select") else [rows[place] for place in longest]
