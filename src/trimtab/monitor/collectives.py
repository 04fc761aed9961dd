"""Which exchange with the other ranks this process is in, or was in last: from torch's own flight recorder.

The recorder keeps the last exchanges of gloo and NCCL in memory, those that DDP and FSDP start in C++ among them; it
is switched on by an environment variable before the processes meet, and costs microseconds an exchange. Nothing here
waits for another rank.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

VARIABLE = "TORCH_FR_BUFFER_SIZE"
_KEPT = "256"


def record_collectives() -> None:
    """Have torch keep its last exchanges; before any process group is made."""
    os.environ.setdefault(VARIABLE, _KEPT)


def last_collective() -> dict[str, Any] | None:
    """The oldest exchange that has not ended, else the last that has; None where there was none, or no recorder.

    `name`, `number`, `shape`, `seconds` since it was entered, `waits` (it has not ended), and `over` its ranks.
    """
    entries = _entries()
    if not entries:
        return None
    open_ones = [entry for entry in entries if _is_open(entry)]
    entry = open_ones[0] if open_ones else entries[-1]
    # A group that was split off has numbers of its own; two of them cannot be compared.
    return {
        "name": str(entry.get("profiling_name", "an exchange")).split(":")[-1],
        "number": int(entry.get("collective_seq_id") or entry.get("p2p_seq_id") or 0),
        "shape": (entry.get("input_sizes") or [[]])[0],
        "seconds": max(0.0, time.time() - int(entry.get("time_created_ns") or 0) / 1e9),
        "waits": bool(open_ones),
        "group": str((entry.get("process_group") or ["", ""])[0]),
    }


def _entries() -> list[dict[str, Any]]:
    try:
        from torch._C import _distributed_c10d
    except ImportError:
        return []
    # Of torch's own, not promised by it: where it is called otherwise the rest of the report must do.
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    try:
        found = json.loads(dump()).get("entries", [])
    except (RuntimeError, TypeError, ValueError):
        return []
    return [entry for entry in found if isinstance(entry, dict)]


def _is_open(entry: dict[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def in_words(collective: dict[str, Any]) -> str:
    """`all_reduce #118 of [4, 5]`."""
    shape = f" of {collective['shape']}" if collective["shape"] else ""
    return f"{collective['name']} #{collective['number']}{shape}"
