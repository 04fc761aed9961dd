"""By how much a device is too small. The rehearsal goes on where its memory ends, so that the whole need is known."""

from __future__ import annotations

import re
from typing import Any

from trimtab.diagnose.finding import Finding, Lack
from trimtab.rehearse.memory_text import size

_DEVICE = re.compile(r"\bGPU (\d+) has a total capacity")


def device_of(message: str) -> str:
    """The device that CUDA's message names."""
    found = _DEVICE.search(message)
    return f"cuda:{found.group(1)}" if found else ""


def need(told: dict[str, Any]) -> int:
    """What a program needs of a device: what its tensors come to, and what CUDA holds beside them."""
    return int(told["peak_bytes"] + told["context_bytes"])


def measure(findings: list[Finding], memory: dict[str, dict[str, Any]]) -> None:
    """Tell of each device that was found too small how much it lacks."""
    for finding in findings:
        told = memory.get(device_of(finding.message)) if finding.kind == "out-of-memory" else None
        if told is None or finding.lack is not None:
            continue
        device, capacity, needed = device_of(finding.message), told["capacity_bytes"], need(told)
        if needed <= capacity:
            # It would fit in one piece: what the allocator reserves to give it out in pieces does not.
            needed = max(needed, int(told["reserved_bytes"] + told["context_bytes"]))
        finding.lack = Lack(device, capacity, needed, max(0, needed - capacity))
        if needed > capacity:
            short = size(needed - capacity)
            finding.message = (
                f"{device} has {size(capacity)}, and the program needs {size(needed)}: {short} too little.\n"
                + finding.message
            )
        finding.op = told["at_peak"]["op"] if finding.op == "alloc" and told["at_peak"] else finding.op
