"""Processes and page-locked memory around virtual GPUs, and the first use of a GPU in a process.

A process forked after CUDA was initialised may not use it, as on hardware; one that is spawned starts with the same
virtual machine (see bootstrap.py), and shares the tensors that it is handed (sharing.py). Pinned memory is ordinary
memory that says it is pinned.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch

from trimtab.virtual import bootstrap, faults, state
from trimtab.virtual.allocator_settings import from_environment
from trimtab.virtual.state import Machine, Patch, VirtualDevice
from trimtab.virtual.wording import AcceleratorError, runtime_error

BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
    "start method"
)
CHILD_TENSOR = runtime_error("initialization error")


def in_bad_fork(in_force: Machine) -> bool:
    """Whether this process was forked from one that had initialised CUDA."""
    return in_force.initialised and in_force.pid != os.getpid()


def touch(in_force: Machine) -> None:
    """A GPU tensor that came over a fork is computed with: the driver's answer differs from torch's own."""
    initialise(in_force, CHILD_TENSOR, AcceleratorError)


def visible(machine: Machine) -> list[int]:
    """Which GPUs the program sees. CUDA_VISIBLE_DEVICES counts if the program set it, not if we found it so."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.initialised or setting is None or setting == machine.visible_at_install:
        return [device.card for device in machine.devices]
    entries = (entry.strip() for entry in setting.split(","))
    # As the driver does: the first bad entry ends the list.
    good = takewhile(lambda entry: entry.isdigit() and int(entry) < len(machine.devices), entries)
    return [int(entry) for entry in good]


def initialise(in_force: Machine, message: str = BAD_FORK, raises: type[RuntimeError] = RuntimeError) -> None:
    """The first use of a GPU in this process. Tells of a fork that cannot use it."""
    if in_bad_fork(in_force):
        faults.report("worker-uses-gpu", message, "cuda.init", raises=raises)
    seen = visible(in_force)
    if not seen:
        raise RuntimeError("No CUDA GPUs are available")
    del in_force.devices[len(seen) :]
    settings = from_environment()
    for device, card in zip(in_force.devices, seen, strict=True):
        device.card = card
        if not in_force.initialised:
            device.pool.configure(settings)
    while in_force.at_first_use:
        in_force.at_first_use.pop()()
    # After a repaired fault too: as if the process had been spawned.
    in_force.pid = os.getpid()
    in_force.initialised = in_force.ready = True
    torch.cuda._initialized = True


def used(in_force: Machine, index: int | None) -> VirtualDevice:
    """The device of an index (None: the current one) that the program is about to use."""
    if not in_force.ready and in_force.at(index) is not in_force.host:
        initialise(in_force)
    return in_force.at(index)


def virtual_device(device: Any) -> torch.device | None:
    """The device as the dispatcher takes it (meta with an index) when it names a virtual GPU, else None."""
    if device.__class__ is torch.device:
        if device.type != "cuda":
            return None
    elif device.__class__ is str:
        if not device.startswith("cuda"):
            return None
        device = torch.device(device)
    elif device.__class__ is int:
        device = torch.device("cuda", device)
    else:
        return None
    in_force = state.machine()
    return used(in_force, device.index).meta if in_force is not None else None


def _after_fork() -> None:
    in_force = state.machine()
    if in_force is not None:
        in_force.ready = False
        for device in in_force.devices:
            device.pool.forked()


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


def hide_real_gpus() -> None:
    """In a process that has virtual GPUs to its end: torch counts the real ones once, and finds none."""
    if not torch._C._has_cuda or state.machine() is not None or torch.cuda.is_initialized():
        return
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a driver that is too old, or none
            torch._C._cuda_getDeviceCount()
    finally:
        if setting is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = setting


def patches(in_force: Machine) -> list[Patch]:
    return [(torch.Tensor, "pin_memory", _pin_memory), (torch.Tensor, "is_pinned", _is_pinned)]


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
