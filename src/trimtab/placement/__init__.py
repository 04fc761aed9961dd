"""Decide: the plan. Resolve it once, apply it, move batches by it, verify it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.placement.apply import (
    bind_arguments,
    checkpoint_plainly,
    default_stream,
    move,
    own_stream,
    place,
    prepare_process,
    trainer_options,
)
from trimtab.placement.arrival import verify_gradients
from trimtab.placement.edges import on_several_devices, return_outputs, take_inputs
from trimtab.placement.memory import OutOfMemory, host_out_of_memory, out_of_memory
from trimtab.placement.plan import MemoryShare, PlacementPlan, PlacementRequest
from trimtab.placement.profile import ModelProfile, Workload, bare_model, profile_model
from trimtab.placement.resolve import check_request, resolve
from trimtab.placement.sizing import PlacementError
from trimtab.placement.verify import Check, PlacementFault, verify

if TYPE_CHECKING:
    from trimtab.placement.guard import PlacementGuard

__all__ = [
    "Check",
    "MemoryShare",
    "ModelProfile",
    "OutOfMemory",
    "PlacementError",
    "PlacementFault",
    "PlacementGuard",
    "PlacementPlan",
    "PlacementRequest",
    "Workload",
    "bare_model",
    "bind_arguments",
    "check_request",
    "checkpoint_plainly",
    "default_stream",
    "host_out_of_memory",
    "move",
    "on_several_devices",
    "out_of_memory",
    "own_stream",
    "place",
    "prepare_process",
    "profile_model",
    "resolve",
    "return_outputs",
    "take_inputs",
    "trainer_options",
    "verify",
    "verify_gradients",
]


def __getattr__(name: str) -> Any:
    # The guard derives from a transformers class; importing that takes seconds that `trimtab plan` need not spend.
    if name == "PlacementGuard":
        from trimtab.placement.guard import PlacementGuard

        return PlacementGuard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
