"""Processes and page-locked memory around virtual GPUs.

A process forked after CUDA was initialised may not use it, as on hardware; one that is spawned starts with the same
virtual machine (see bootstrap.py). Pinned memory is ordinary memory that says it is pinned. Never shares a GPU tensor
between processes without a copy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from trimtab.virtual import bootstrap, faults, state
from trimtab.virtual.state import machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.virtual.state import Machine

BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
    "start method"
)


CHILD_TENSOR = (
    "CUDA error: initialization error\nCUDA kernel errors might be asynchronously reported at some other API call, "
    "so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def in_bad_fork(in_force: Machine) -> bool:
    """Whether this process was forked from one that had initialised CUDA."""
    return in_force.initialised and in_force.pid != os.getpid()


def initialise(in_force: Machine) -> None:
    """The first use of a GPU in this process. Tells of a fork that cannot use it."""
    if in_bad_fork(in_force):
        faults.report(faults.make("worker-uses-gpu", BAD_FORK, "cuda.init", []), RuntimeError(BAD_FORK))
    initialise_here(in_force)


def initialise_here(in_force: Machine) -> None:
    """From now on this process may use the GPUs (after a repaired fault: as if it had been spawned)."""
    in_force.pid = os.getpid()
    in_force.initialised = True
    in_force.ready = True
    torch.cuda._initialized = True


def touch(in_force: Machine) -> None:
    """A GPU tensor that came over a fork is computed with: the driver's answer differs from torch's own."""
    if in_bad_fork(in_force):
        error = state.accelerator_error(CHILD_TENSOR)
        faults.report(faults.make("worker-uses-gpu", CHILD_TENSOR, "cuda.init", []), error)
    initialise_here(in_force)


def _after_fork() -> None:
    in_force = machine()
    if in_force is not None:
        in_force.ready = False


os.register_at_fork(after_in_child=_after_fork)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """For CPU tensors; a virtual tensor has its own, which refuses. It is the memory that is pinned: views are too."""
    torch.cuda._lazy_init()
    if _is_pinned(self):
        return self
    copy = self.clone()
    copy.untyped_storage()._virtual_pinned = True  # type: ignore[attr-defined]
    return copy


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return self.layout is torch.strided and hasattr(self.untyped_storage(), "_virtual_pinned")


def patches(in_force: Machine) -> list[tuple[object, str, object]]:
    return [
        (torch.Tensor, "pin_memory", _pin_memory),
        (torch.Tensor, "is_pinned", _is_pinned),
    ]


def enter(in_force: Machine) -> Callable[[], None]:
    """Give the processes that this one starts the same virtual machine; returns the undo."""
    variables = bootstrap.environment(in_force)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)

    def leave() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return leave
