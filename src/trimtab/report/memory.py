"""What each device held, on the page of a rehearsal: over the step by kind, at the peak, and in every phase."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from trimtab.monitor.wording import size
from trimtab.report.charts import Chart, Line, Mark, Peak, figure, length, short
from trimtab.report.code import Sources, place
from trimtab.report.frame import LONGEST_NAME, cut, folded, raw_facts, raw_table, table, text
from trimtab.report.layers import together

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary", "cache", "workspace", "other")
"""From the bottom of a stack to its top; each has its colour everywhere."""
_NEAR = 0.7
"""The share of the capacity from which on it is drawn into the chart."""
Told = Mapping[str, Any]


def memory_parts(memory: Mapping[str, Told], sources: Sources) -> Iterable[str]:
    """All that a rehearsal's record tells of its devices; those that were used alike are told once."""
    used = {device: told for device, told in memory.items() if told["peak_bytes"]}
    yield _overview(used)
    shown: set[object] = set()
    for devices, told in _alike(used):
        if told.get("at_peak") or told.get("timeline") or told.get("phases"):
            yield f"<h3>{text(devices)}</h3>"
            yield _over_time(devices, told)
            line = repr([(told.get("at_peak") or {}).get(name) for name in ("where", "inside")])
            # One line with what stands around it is enough for all devices that peak there.
            yield _at_peak(told, {} if line in shown else sources)
            shown.add(line)
            yield _phases(told)


def _overview(used: Mapping[str, Told]) -> str:
    further = any("reserved_bytes" in told for told in used.values())
    head = ["device", "peak", *(["reserved", "CUDA itself"] if further else []), "capacity", "of it"]
    rows = []
    for devices, told in _alike(used):
        more = [size_of(told.get("reserved_bytes")), size_of(told.get("context_bytes"))] if further else []
        rows.append(
            [
                *map(text, [devices, size_of(told["peak_bytes"]), *more, size_of(told["capacity_bytes"])]),
                _share(told),
            ]
        )
    return raw_table(head, rows, cards=True)


def _share(told: Told) -> str:
    """How full a device was, as a bar and in words."""
    held = max(told["peak_bytes"], told.get("reserved_bytes") or 0) + (told.get("context_bytes") or 0)
    share = held / told["capacity_bytes"] if told["capacity_bytes"] else 0.0
    bar = length({"held": min(share, 1.0)}, 1.0)
    return f"{bar}{text(f'{share:.1%}')}"


def _over_time(devices: str, told: Told) -> str:
    line = told.get("timeline") or {}
    kinds = {kind: held for kind, held in in_order(line.get("kinds") or {}) if any(held)}
    at = line.get("at") or []
    if not at or not kinds:
        return ""
    totals = [sum(held[n] for held in kinds.values()) for n in range(len(at))]
    highest = max(range(len(at)), key=totals.__getitem__)
    unit, scale = _unit(totals[highest])
    capacity = told["capacity_bytes"]
    near = capacity and totals[highest] > _NEAR * capacity
    chart = Chart(
        f"Memory over the phase “{line.get('phase', '')}” ({devices})",
        "allocation or release",
        unit,
        [
            Line(kind, [(float(x), held[n] / scale) for n, x in enumerate(at)], shade=shade_of(kind))
            for kind, held in kinds.items()
        ],
        kind="stack",
        levels={"capacity": capacity / scale} if near else {},
        marks=[Mark(float(mark["at"]), str(mark["name"])) for mark in line.get("marks") or []],
        peak=Peak(float(at[highest]), totals[highest] / scale, f"peak {totals[highest] / scale:,.4g} {unit}"),
    )
    return figure(chart)


def _at_peak(told: Told, sources: Sources) -> str:
    """Where the peak was, and what was held then."""
    peak = told.get("at_peak")
    if not peak:
        return ""
    held = [f"{kind} {size_of(count)}" for kind, count in in_order(peak.get("kinds") or {}) if count]
    rows = [
        ("peak", text(f"{size_of(told['peak_bytes'])}, in the phase “{peak.get('phase', '')}”")),
        ("held then", text(", ".join(held))),
        ("op", cut(peak.get("op") or "", LONGEST_NAME)),
        ("module", cut(peak.get("module") or "", LONGEST_NAME)),
        ("line", place(peak.get("where"), sources)),
        ("inside", place(peak.get("inside"), sources)),
    ]
    return raw_facts(rows)


def _phases(told: Told) -> str:
    phases = told.get("phases") or []
    if not phases:
        return ""
    longest = max(phase["peak_bytes"] for phase in phases)
    shades = {kind: shade_of(kind) for phase in phases for kind in phase.get("kinds") or {}}
    rows = [
        [
            text(phase["name"]),
            length(dict(in_order(phase.get("kinds") or {"": phase["peak_bytes"]})), longest, shades),
            text(size_of(phase["peak_bytes"])),
            text(size_of(phase.get("reserved_bytes"))),
            text(", ".join(filter(None, [phase.get("module"), phase.get("op")]))),
        ]
        for phase in phases
    ]
    kinds = [kind for kind, _ in in_order(shades) if any((p.get("kinds") or {}).get(kind) for p in phases)]
    by_kind = table(
        ["phase", *kinds],
        (
            [phase["name"], *(size_of((phase.get("kinds") or {}).get(kind)) for kind in kinds)]
            for phase in phases
        ),
    )
    drawn = raw_table(
        ["phase", "at its peak", "allocated", "reserved", "where the peak was"], rows, cards=True
    )
    more = keys({kind: shade_of(kind) for kind in kinds}) + folded("By kind", by_kind) if kinds else ""
    return f"<h4>Phases</h4>{drawn}{more}"


def keys(shades: Mapping[str, int]) -> str:
    """Which colour and hatching of a bar is which kind."""
    shown = "".join(f'<span><i class="shade-{n}"></i>{text(kind)}</span>' for kind, n in shades.items())
    return f'<p class="keys length">{shown}</p>' if shown else ""


def in_order(kinds: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Kinds as they stand on one another; those that are not known here stand last."""
    known = {kind: kinds[kind] for kind in KINDS if kind in kinds}
    return list({**known, **kinds}.items())


def shade_of(kind: str) -> int:
    """The number of a kind's colour, the same on every page."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS) - 1


def _unit(most: int) -> tuple[str, float]:
    return ("GiB", 2.0**30) if most >= 2**30 else ("MiB", 2.0**20) if most >= 2**20 else ("KiB", 2.0**10)


def size_of(count: int | None) -> str:
    """An amount of memory that no line breaks."""
    if count is None:
        return "–"
    small = f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count} B"
    shown = size(count) if count >= 2**20 else small if count else "0"
    return shown.replace(" ", "\N{NO-BREAK SPACE}")


def _alike(used: Mapping[str, Told]) -> list[tuple[str, Told]]:
    """Neighbouring devices with the same figures are one; layers of a split differ by their numbers alone."""

    def figures(pair: tuple[str, Told]) -> object:
        told = pair[1]
        peak = told.get("at_peak") or {}
        return (
            [told.get(name) for name in ("peak_bytes", "reserved_bytes", "capacity_bytes")],
            peak.get("kinds"),
            re.sub(r"\d+", "0", str(peak.get("module"))),
            [(phase["name"], phase["peak_bytes"]) for phase in told.get("phases") or []],
        )

    groups = (list(group) for _, group in groupby(used.items(), key=figures))
    return [(short(together([device for device, _ in group])), _of_the_first(group)) for group in groups]


def _of_the_first(group: Sequence[tuple[str, Told]]) -> Told:
    """What is told of all of them; a module that the others have under another number is called the first one's."""
    device, told = group[0]
    peak = told.get("at_peak") or {}
    if all((other.get("at_peak") or {}).get("module") == peak.get("module") for _, other in group):
        return told
    return {**told, "at_peak": {**peak, "module": f"{peak['module']} on {device}"}}
