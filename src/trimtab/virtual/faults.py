"""A fault is something that would fail on hardware. This module describes one and hands it on.

It does not decide what a fault's cause is (see trimtab.diagnose) nor what counts as one (see rules.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType

import torch

from trimtab.virtual import origin, state
from trimtab.virtual.observer import Fault, Operand


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


def report(
    kind: str,
    message: str,
    op: str,
    operands: Sequence[tuple[str, torch.Tensor]] = (),
    raises: type[BaseException] | None = None,
) -> None:
    """A fault at the present place in the program: tell the observer; then raise, unless the machine repairs.

    `raises` is what the hardware would raise; without it a DeviceMismatch carries the message. Every rule ends here.
    """
    frames = origin.stack(1)
    users = [frame for frame, user in frames if user]
    fault = Fault(
        kind=kind,
        message=message,
        op=op,
        operands=[operand(name, tensor) for name, tensor in operands],
        frame=users[0] if users else None,
        stack=users,
        frames=[frame for frame, _ in frames],
    )
    machine = state.machine()
    if machine is not None:
        caught = machine.observer is not None and machine.observer.catches(fault)
        repairs = machine.on_fault == "repair" and not caught
        if machine.observer is not None and not caught and not (repairs and _echo(fault, machine)):
            machine.observer.fault(fault)
        if repairs:
            for _, tensor in operands:
                _bring_gradient_home(tensor)
            return
    if raises is None:
        raise DeviceMismatch(fault)
    # No name of this frame may hold it: the error would hold itself by its traceback, and with it every tensor of the
    # frames above, until the garbage is collected. CUDA's does not.
    raise _made(raises, fault)


def _made(raises: type[BaseException], fault: Fault) -> BaseException:
    error = raises(fault.message)
    error.fault = fault  # type: ignore[attr-defined]
    return error


def _bring_gradient_home(tensor: torch.Tensor) -> None:
    """A stray operand is moved by the repair: its gradient comes back to it, as that of any moved tensor does.

    Otherwise a weight had a gradient on another device, which no hardware gives, and the step would fail for that.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled() or tensor.__dict__.get(_HOOKED):
        return
    home = tensor.device
    if tensor.is_leaf:
        tensor.register_post_accumulate_grad_hook(_home_with_its_leaf)
    elif home.type == "cuda":
        # Of a result on the CPU the engine wants a gradient of the class that it has.
        tensor.register_hook(lambda gradient: gradient if gradient.device == home else gradient.to(home))
    tensor.__dict__[_HOOKED] = True


def _gradients_are_apart() -> bool:
    """Whether the step that runs has a gradient on another device than its parameter: only a repair leaves that."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stepped = frame.f_locals.get("self") if "step" in frame.f_code.co_name else None
        if isinstance(stepped, torch.optim.Optimizer):
            parameters = [p for group in stepped.param_groups for p in group["params"]]
            return any(p.grad is not None and p.grad.device != p.device for p in parameters)
        frame = frame.f_back
    return False


def _home_with_its_leaf(leaf: torch.Tensor) -> None:
    if leaf.grad is not None and leaf.grad.device != leaf.device:
        gradient, leaf.grad = leaf.grad, None
        leaf.grad = gradient.detach().to(leaf.device)


_HOOKED = "_trimtab_hooked"
_FORWARD = ("device-mismatch", "index-device", "dtype-mismatch")


def _echo(fault: Fault, machine: state.Machine) -> bool:
    """Whether a fault in backward only repeats one that was repaired in forward: the same operands, no user code.

    On hardware the forward would have raised, and this backward would never have run.
    """
    if fault.kind not in _FORWARD:
        return False
    if machine.repaired and _gradients_are_apart():
        return True
    if torch._C._current_graph_task_id() == -1:
        machine.repaired = True
        return False
    # The nearest of the two: the engine of the backward pass, or a line of the user's.
    nearest = (f for f in fault.frames if f.function == "_engine_run_backward" or f in fault.stack)
    first = next(nearest, None)
    return machine.repaired and first is not None and first.function == "_engine_run_backward"
