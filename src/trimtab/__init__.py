"""Trimtab: fine-tuning with one plan for every tensor. Importing this package never imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trimtab.processor import keep_off_hidden_tiles

if TYPE_CHECKING:
    from trimtab.hardware import probe
    from trimtab.placement import (
        PlacementGuard,
        PlacementPlan,
        PlacementRequest,
        move,
        place,
        resolve,
        verify,
    )
    from trimtab.virtual import virtual_gpus

__version__ = "0.1.0"

__all__ = [
    "PlacementGuard",
    "PlacementPlan",
    "PlacementRequest",
    "move",
    "place",
    "probe",
    "resolve",
    "verify",
    "virtual_gpus",
]
keep_off_hidden_tiles()
_ROOMS = {"probe": "trimtab.hardware", "virtual_gpus": "trimtab.virtual"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_ROOMS.get(name, "trimtab.placement")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
