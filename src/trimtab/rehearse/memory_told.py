"""What the ledgers of a process's virtual GPUs know, as the report's JSON tells it; and one record of several."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trimtab.diagnose import source

if TYPE_CHECKING:
    from trimtab.virtual.ledger import Peak
    from trimtab.virtual.origin import Handle
    from trimtab.virtual.state import Machine, VirtualDevice

Told = dict[str, Any]
"""The memory of one device."""


def of(machine: Machine) -> dict[str, Told]:
    """Each device's record."""
    from trimtab.virtual import places

    names = places.names(machine.modules)
    return {f"cuda:{device.index}": _of_device(device, names) for device in machine.devices}


def _of_device(device: VirtualDevice, names: dict[int, str]) -> Told:
    told: Told = {
        "capacity_bytes": int(device.total_bytes),
        "peak_bytes": int(device.peak),
        "reserved_bytes": 0,
        "context_bytes": int(device.context_bytes),
        "at_peak": None,
        "phases": [],
        "timeline": None,
    }
    if device.pool.allowed is not None:
        told["allowed_bytes"] = int(device.pool.allowed)
    peaks = _by_phase(device.ledger.peaks(names))
    if not peaks:
        return told
    told["phases"] = [_phase(peak) for peak in peaks]
    highest = max(peaks, key=lambda peak: peak.peak_bytes)
    at_peak = _phase(highest)
    told["peak_bytes"] = max(int(device.peak), highest.peak_bytes)
    if device.pool.awaited:
        told["awaited_blocks"] = device.pool.awaited
    told["reserved_bytes"] = max(peak.reserved_bytes for peak in peaks)
    told["at_peak"] = {
        "phase": at_peak["name"],
        **{name: at_peak[name] for name in ("kinds", "op", "module", "where", "inside")},
    }
    line = device.ledger.timeline(highest.phase)
    marks = [{"at": at, "name": name} for at, name in line.marks]
    told["timeline"] = {"phase": line.phase, "at": line.at, "kinds": line.kinds, "marks": marks}
    return told


def _by_phase(peaks: list[Peak]) -> list[Peak]:
    """One for each phase, in the order in which they were first met."""
    best: dict[str, Peak] = {}
    for peak in peaks:
        known = best.get(peak.phase)
        if known is None or peak.peak_bytes > known.peak_bytes:
            best[peak.phase] = peak
    return list(best.values())


def _phase(peak: Peak) -> Told:
    where = _place(peak.where)
    inside = _place(peak.inside)
    return {
        "name": peak.phase,
        "peak_bytes": peak.peak_bytes,
        "reserved_bytes": peak.reserved_bytes,
        "kinds": peak.kinds,
        "op": peak.op,
        "module": peak.module,
        "where": where,
        "inside": inside if inside != where else None,
    }


def _place(handle: Handle | None) -> dict[str, Any] | None:
    from trimtab.virtual import origin

    line = origin.resolve(handle)
    return asdict(source.place(line.file, line.line)) if line is not None else None


def doubts(memory: dict[str, Told]) -> list[str]:
    """What is not certain of these figures."""
    return [
        f"{device}: {told['awaited_blocks']} blocks were freed while another stream used them (record_stream); how "
        "long they wait there is a matter of time, which is not rehearsed: more may be reserved than is told"
        for device, told in memory.items()
        if told.get("awaited_blocks")
    ]


def joined(known: dict[str, Told], more: dict[str, Told]) -> dict[str, Told]:
    """The records of two processes: of a device that both used, that of the higher peak."""
    result = dict(known)
    for device, told in more.items():
        if device not in result or told["peak_bytes"] > result[device]["peak_bytes"]:
            result[device] = told
    return result
