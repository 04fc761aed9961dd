"""Saving and loading: a virtual tensor is written as the CUDA tensor it stands for, and read back where asked.

A file written here is an ordinary checkpoint. Without virtual GPUs it loads as one from a GPU would: on the CPU with
map_location, and with torch's own error without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import origin, processes, state
from trimtab.virtual.storage import VirtualStorage, cpu_copy, is_shape, label_storage
from trimtab.virtual.tensor import wrap

_OURS = {origin.ATTRIBUTE, origin.EXTENTS, origin.SHAPE}


def without_origin(original: Any) -> Any:
    """torch._utils._get_obj_state without our own attributes: where a tensor was born is nobody's data."""

    def _get_obj_state(obj: Any) -> Any:
        found = original(obj)
        if isinstance(found, dict) and not found.keys().isdisjoint(_OURS):
            found = {name: value for name, value in found.items() if name not in _OURS}
        return found

    return _get_obj_state


def rebuild_tensor(original: Any) -> Any:
    """torch._utils._rebuild_tensor that makes a virtual tensor of a storage marked as virtual."""

    def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        untyped = storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage
        machine = state.machine()
        if not isinstance(untyped, VirtualStorage) or machine is None:
            return original(storage, offset, size, stride)  # type: ignore[no-any-return]
        where = untyped.device
        with torch._C.DisableTorchFunction():
            payload = torch.empty(0, dtype=storage.dtype, device="meta" if is_shape(untyped) else "cpu")
            payload.set_(untyped, offset, tuple(size), tuple(stride))
        slot = machine.host if where.type == "cpu" else processes.used(machine, where.index)
        made = wrap(payload, slot, getattr(untyped, "_virtual_block", None))
        untyped._virtual_block = made._block  # type: ignore[attr-defined]  # tensors on one storage share its memory
        return made

    return _rebuild_tensor


def restore_location(original: Any) -> Any:
    """torch.serialization.default_restore_location that knows the virtual GPUs."""

    def default_restore_location(storage: Any, location: Any) -> Any:
        machine = state.machine()
        if machine is None or not str(location).startswith("cuda"):
            return original(storage, location)
        device = torch.device(location)
        index = machine.current_device if device.index is None else device.index
        if index >= len(machine.devices):
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{len(machine.devices)}. Please use torch.load with map_location to map your storages to an "
                "existing device."
            )
        return label_storage(storage, processes.used(machine, index).device)

    return default_restore_location


def _storage_cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:
    machine = state.machine()
    assert machine is not None
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return label_storage(cpu_copy(self), processes.used(machine, target.index).device)


def _storage_to(original: Any) -> Any:
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device)
        if target.type == "cuda":
            return _storage_cuda(self, target)
        return self.cpu() if isinstance(self, VirtualStorage) else original(self, device=device)

    return to


def patches(machine: state.Machine) -> list[state.Patch]:
    """What has to be replaced while a machine is in force."""
    return [
        (torch._utils, "_get_obj_state", without_origin(torch._utils._get_obj_state)),
        (torch._utils, "_rebuild_tensor", rebuild_tensor(torch._utils._rebuild_tensor)),
        (
            torch.serialization,
            "default_restore_location",
            restore_location(torch.serialization.default_restore_location),
        ),
        (torch.UntypedStorage, "cuda", _storage_cuda),
        (torch.UntypedStorage, "to", _storage_to(torch.UntypedStorage.to)),
    ]
