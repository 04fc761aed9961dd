"""Trimtab: fine-tuning with one plan for every tensor. Importing this package never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.placement import (
        PlacementGuard,
        PlacementPlan,
        PlacementRequest,
        move,
        place,
        resolve,
        verify,
    )

__version__ = "0.1.0"

__all__ = ["PlacementGuard", "PlacementPlan", "PlacementRequest", "move", "place", "probe", "resolve", "verify"]


def __getattr__(name: str) -> Any:
    if name == "probe":
        import trimtab.hardware

        return trimtab.hardware.probe
    if name in __all__:
        import trimtab.placement

        return getattr(trimtab.placement, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
