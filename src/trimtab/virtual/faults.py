"""A fault is something that would fail on hardware. This module describes one and hands it on.

It does not decide what a fault's cause is (see trimtab.diagnose) nor what counts as one (see rules.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trimtab.virtual import origin, state
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


class DeviceMismatch(RuntimeError):
    """Raised where CUDA would raise because operands are on devices that do not mix."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def operand(name: str, tensor: torch.Tensor) -> Operand:
    """Describe one tensor as an operand."""
    return Operand(
        name=name,
        device=str(tensor.device),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        origin=origin.born_of(tensor),
        tensor=weakref.ref(tensor),
    )


def make(kind: str, message: str, op: str, operands: Sequence[tuple[str, torch.Tensor]]) -> Fault:
    """A fault at the present place in the program."""
    frames = origin.stack(1)
    users = [frame for frame, user in frames if user]
    return Fault(
        kind=kind,
        message=message,
        op=op,
        operands=[operand(name, tensor) for name, tensor in operands],
        frame=users[0] if users else None,
        stack=users,
        frames=[frame for frame, _ in frames],
    )


def report(fault: Fault, error: BaseException | None = None) -> None:
    """Tell the observer; then raise, unless the machine repairs. Every rule ends here.

    `error` is the exception that the hardware would raise; without it a DeviceMismatch carries the message.
    """
    machine = state.machine()
    if machine is not None:
        repairs = machine.on_fault == "repair"
        if machine.observer is not None and not (repairs and _echo(fault, machine)):
            machine.observer.fault(fault)
        if repairs:
            return
    if error is None:
        error = DeviceMismatch(fault)
    elif not hasattr(error, "fault"):
        error.fault = fault  # type: ignore[attr-defined]
    raise error


_FORWARD = ("device-mismatch", "index-device", "dtype-mismatch")


def _echo(fault: Fault, machine: state.Machine) -> bool:
    """Whether a fault in backward only repeats one that was repaired in forward: the same operands, no user code.

    On hardware the forward would have raised, and this backward would never have run.
    """
    if fault.kind not in _FORWARD:
        return False
    if torch._C._current_graph_task_id() == -1:
        machine.extras["repaired"] = True
        return False
    if not machine.extras.get("repaired"):
        return False
    for frame in fault.frames:
        if frame.function == "_engine_run_backward":
            return True
        if frame in fault.stack:
            return False
    return False
