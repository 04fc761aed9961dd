"""Words what a run says when a device has no memory left. It measures nothing and frees nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.errors import TrimtabError
from trimtab.placement.plan import PlacementPlan


def out_of_memory(
    plan: PlacementPlan, settings: Mapping[str, object], held: str, changes: Sequence[str]
) -> TrimtabError:
    """The error of a run that ended for want of memory.

    `settings` are those that the need grows with, `held` is what had to lie in memory at once ("weights, gradients
    and activations"), `changes` are the ways out, the best first.
    """
    asked = ", ".join(f"{name}={value}" for name, value in settings.items())
    planned = ", ".join(
        f"{share.needed / 2**30:.1f} of {share.capacity / 2**30:.1f} GiB on {device}"
        for device, share in plan.memory.items()
        if device in plan.devices
    )
    estimate = f": {planned}" if planned else ""
    ways = f"{', '.join(changes[:-1])}, or {changes[-1]}" if len(changes) > 1 else "".join(changes)
    return TrimtabError(
        f"out of memory on {', '.join(plan.devices)} with {asked}\n"
        f"  why: {held} did not fit (the plan's figure is an estimate{estimate})\n"
        f"  change: {ways}"
    )
