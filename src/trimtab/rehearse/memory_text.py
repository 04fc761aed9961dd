"""Memory of a rehearsal for the console: what each GPU held at its peak, where that was, and every phase's own peak."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from trimtab.diagnose.finding import Place, place_from
from trimtab.errors import shown

Memory = dict[str, dict[str, Any]]
_LEAST = 0.005
"""A kind with a smaller share of the peak is not told."""


def size(count: int) -> str:
    """An amount of memory as people say it."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def peaks(memory: Memory) -> list[str]:
    """Each GPU's peak; neighbours with the same one are told together."""
    return [
        f"{who} peak {size(told['peak_bytes'])} of {size(told['capacity_bytes'])}"
        for who, told in _alike(memory)
    ]


def table(memory: Memory, line_of: Callable[[Place], str]) -> list[str]:
    """The lines of the table; none where no GPU was used, or nothing is known of its allocations."""
    lines: list[str] = []
    for who, told in _alike(memory):
        if not told.get("phases"):
            continue
        at_peak = told["at_peak"]
        lines.append(
            f"   {who}: {size(told['peak_bytes'])} of {size(told['capacity_bytes'])}, "
            f"{size(told['reserved_bytes'])} reserved" + _context(told)
        )
        lines.append(f"     held       {_kinds(at_peak['kinds'])}")
        lines += [
            f"     {label:<11}{text}"
            for label, text in zip(("peak in", ""), _where(at_peak, line_of), strict=False)
        ]
        width = max(len(phase["name"]) for phase in told["phases"])
        for number, phase in enumerate(told["phases"]):
            label = "" if number else "phases"
            lines.append(f"     {label:<11}{phase['name']:<{width}}  {size(phase['peak_bytes']):>9}")
    return lines


def _context(told: dict[str, Any]) -> str:
    held = told["context_bytes"]
    return f", {size(held)} beside it for CUDA itself" if held else ""


def _kinds(kinds: dict[str, int]) -> str:
    least = _LEAST * sum(kinds.values())
    most_first = sorted(kinds.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{kind} {size(held)}" for kind, held in most_first if held > least) or "nothing"


def _where(at_peak: dict[str, Any], line_of: Callable[[Place], str]) -> list[str]:
    """The phase with operation and module, and the line of the program, or of a library."""
    what = [at_peak["phase"], at_peak["op"].removeprefix("aten::"), at_peak["module"]]
    place = place_from(at_peak["where"]) or place_from(at_peak["inside"])
    return [
        shown(" ".join(", ".join(filter(None, what)).split())),
        *([_cut(line_of(place))] if place is not None else []),
    ]


def _cut(text: str, most: int = 94) -> str:
    return text if len(text) <= most else text[: most - 2] + " …"


def _alike(memory: Memory) -> list[tuple[str, dict[str, Any]]]:
    """The GPUs that were used; neighbours whose figures are the same are one."""
    used = [(device, told) for device, told in memory.items() if told["peak_bytes"]]
    found: list[tuple[str, dict[str, Any]]] = []
    for _, group in groupby(used, key=lambda pair: (pair[1]["peak_bytes"], pair[1]["capacity_bytes"])):
        alike = list(group)
        first = alike[0][0]
        found.append((first if len(alike) == 1 else f"{first} to {alike[-1][0]} each", alike[0][1]))
    return found
