"""What a rehearsal may listen to. Every method here does nothing; a listener overrides what it wants.

An observer never changes what happens: whether a fault raises or is repaired is the machine's setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.virtual.faults import Fault


class Observer:
    """Base class for listeners. Set `wants_ops` to be told of every operation (dear: one call per op)."""

    wants_ops: bool = False

    def fault(self, fault: Fault) -> None:
        """Told of each fault before it raises or is repaired."""

    def op(self, name: str) -> None:
        """Told of each operation that reaches the dispatcher, by its aten name; only when `wants_ops`."""

    def collective(self, record: dict[str, Any]) -> None:
        """Told of each collective call between ranks."""
