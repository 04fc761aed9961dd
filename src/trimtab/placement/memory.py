"""Words what a run says when a device, or the machine itself, has no memory left. It frees nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.errors import TrimtabError
from trimtab.file_system import amount
from trimtab.placement.plan import PlacementPlan
from trimtab.shortage import MemoryFault


class OutOfMemory(TrimtabError):
    """The run ended for want of memory."""


def out_of_memory(
    plan: PlacementPlan,
    settings: Mapping[str, object],
    held: str,
    changes: Sequence[str],
    also: Sequence[str] = (),
) -> OutOfMemory:
    """The error of a run that ended for want of memory on its device.

    `settings` are those that the need grows with, `held` is what had to lie in memory at once ("weights, gradients
    and activations"), `changes` are the ways out, the best first; `also`: what was kept, and how to go on.
    """
    planned = ", ".join(
        f"{share.needed / 2**30:.1f} of {share.capacity / 2**30:.1f} GiB on {device}"
        for device, share in plan.memory.items()
        if device in plan.devices
    )
    told = f": {planned}" if planned else ""
    executed = any(share.executed for share in plan.memory.values())
    figure = (
        "the plan's figure was executed on virtual GPUs" if executed else "the plan's figure is an estimate"
    )
    return _worded(
        f"out of memory on {', '.join(plan.devices)}",
        settings,
        f"{held} did not fit ({figure}{told})",
        changes,
        also,
    )


def host_out_of_memory(
    lack: MemoryFault, settings: Mapping[str, object], changes: Sequence[str], also: Sequence[str] = ()
) -> OutOfMemory:
    """The error of a run that ended for want of the machine's own memory, or of a worker's that the system killed."""
    from trimtab.hardware.cgroup import memory_limit

    limit = memory_limit()
    most = f"; this process may use {amount(limit.limit_bytes)}" if limit is not None else ""
    told = f"the system said: {lack.said}{most}"
    if lack.where == "worker":
        return _worded(
            "a process of the data loader was killed",
            settings,
            f"most often the machine's memory, or its shared memory (/dev/shm), was used up ({told})",
            changes,
            also,
        )
    return _worded("out of memory on this machine (RAM, not a GPU)", settings, told, changes, also)


def _worded(
    found: str, settings: Mapping[str, object], why: str, changes: Sequence[str], also: Sequence[str]
) -> OutOfMemory:
    asked = ", ".join(f"{name}={value}" for name, value in settings.items())
    ways = f"{', '.join(changes[:-1])}, or {changes[-1]}" if len(changes) > 1 else "".join(changes)
    kept, go_on = (f"; {also[0]}", f"; then {also[1]}") if also else ("", "")
    return OutOfMemory(f"{found} with {asked}\n  why: {why}{kept}\n  change: {ways}{go_on}")
