"""What is shown and watched while a run goes: progress, metrics, memory, health and a watchdog.

This room never decides where anything runs (the device is given to it) and never changes the training.
Importing it imports neither torch nor transformers: `MonitorCallback` and `NonFiniteError` load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.monitor.callback import MonitorCallback
    from trimtab.monitor.health import NonFiniteError

__all__ = ["MonitorCallback", "NonFiniteError"]


def __getattr__(name: str) -> Any:
    if name == "MonitorCallback":
        from trimtab.monitor.callback import MonitorCallback

        return MonitorCallback
    if name == "NonFiniteError":
        from trimtab.monitor.health import NonFiniteError

        return NonFiniteError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
