"""What a rehearsal may listen to, and the fault that it is told of. Every method of a listener does nothing here.

Whether a fault raises or is repaired is the machine's setting; an observer changes nothing but this: of an error that
it knows the program to catch (`catches`), it has it raised.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from trimtab.virtual.origin import Origin


@dataclass
class Operand:
    """One tensor that took part in the failing operation."""

    name: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    origin: Origin | None = None
    tensor: weakref.ReferenceType[torch.Tensor] | None = None


@dataclass
class Fault:
    """What would fail, in the words of the hardware, and where."""

    kind: str
    message: str
    op: str
    operands: list[Operand] = field(default_factory=list)
    frame: Origin | None = None
    """The nearest line of user code; None when no user code is on the stack."""
    stack: list[Origin] = field(default_factory=list)
    """User frames, innermost first."""
    frames: list[Origin] = field(default_factory=list)
    """All frames, libraries included, innermost first."""


How = Literal["value", "decision", "shape", "copy"]
"""How a value was asked for: taken to be shown, to branch on, to make a tensor's shape, or written to host memory."""


@dataclass(frozen=True)
class Asked:
    """A value that was asked of a tensor that has a shape only."""

    how: How
    op: str
    frame: Origin | None
    """The nearest line of user code."""
    library: Origin | None
    """The nearest line outside torch and the standard library, user's or not."""


class Observer:
    """Base class for listeners. Set `wants_ops` to be told of every operation (dear: one call per op)."""

    wants_ops: bool = False

    def fault(self, fault: Fault) -> None:
        """Told of each fault before it raises or is repaired."""

    def catches(self, fault: Fault) -> bool:
        """Whether the program catches what hardware raises here, to go on otherwise: then it is raised, and told of no
        more."""
        return False

    def op(self, name: str) -> None:
        """Told of each operation that reaches the dispatcher, by its aten name; only when `wants_ops`."""

    def asked(self, asked: Asked) -> None:
        """Told of each value that was asked of a shape (machines with shapes only)."""

    def unproven(self, text: str) -> None:
        """Told of what could not be computed: from there on values are made up."""

    def note(self, text: str) -> None:
        """Told of what was counted or done otherwise than on hardware, and changes no value."""

    def not_simulated(self, text: str) -> None:
        """Told of each refusal of what virtual GPUs do not do, as it is raised; the program may catch it."""

    def collective(self, record: dict[str, Any]) -> None:
        """Told of each collective call between ranks."""

    def message(self, record: dict[str, Any]) -> None:
        """Told of each send, and of each receive from a rank by its number."""

    def group_made(self, members: list[int]) -> None:
        """Told of each group that `new_group` is about to make, a matter of all ranks."""

    def exchange(self, op: str, tensors: list[torch.Tensor], whole: bool) -> None:
        """Told of every exchange between ranks, sends and receives too; `whole` when all ranks take part."""
