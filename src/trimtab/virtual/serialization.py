"""Saving and loading: a virtual tensor is written as the CUDA tensor it stands for, and read back where asked.

A file written here is an ordinary checkpoint. Without virtual GPUs it loads as one from a GPU would: on the CPU with
map_location, and with torch's own error without.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.virtual import memory, origin, state

if TYPE_CHECKING:
    from trimtab.virtual.tensor import VirtualTensor


class VirtualStorage(torch.UntypedStorage):
    """A payload's storage that says it is on a virtual GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._virtual_device  # type: ignore[attr-defined,no-any-return]

    @property
    def is_cuda(self) -> bool:
        return True

    def get_device(self) -> int:
        return self.device.index

    def resize_(self, size: int) -> Any:
        """FSDP frees and makes its gathered weights by this; the memory of the device knows it."""
        made = super().resize_(size)
        block = getattr(self, "_virtual_block", None)
        if block is not None:
            memory.resize(block, size)
        return made

    def cpu(self) -> torch.UntypedStorage:
        return cpu_copy(self)

    def __reduce__(self) -> Any:
        # Reached by plain pickling and by multiprocessing; torch.save writes the bytes itself.
        return _storage_from, (bytes(cpu_copy(self).tolist()), str(self.device))

    def __repr__(self) -> str:
        return f"[torch.storage.UntypedStorage(device={self.device}) of size {len(self)}]"


def label_storage(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """Mark a payload's storage as being on a virtual device."""
    if storage.__class__ is torch.UntypedStorage:
        storage.__class__ = VirtualStorage
    storage._virtual_device = device  # type: ignore[attr-defined]
    return storage


def _storage_from(data: bytes, location: str) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        storage = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).clone().untyped_storage()
    return torch.serialization.default_restore_location(storage, location)  # type: ignore[no-any-return]


def cpu_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """An ordinary CPU storage with the same bytes."""
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).clone().untyped_storage()


def reduce(tensor: VirtualTensor) -> tuple[Any, ...]:
    """What pickle and torch.save write."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, OrderedDict())
    payload = tensor.payload
    untyped = label_storage(payload.untyped_storage(), tensor._slot.device)
    storage = torch.TypedStorage(wrap_storage=untyped, dtype=payload.dtype, _internal=True)
    place = (payload.storage_offset(), tuple(payload.size()), payload.stride())
    return torch._utils._rebuild_tensor_v2, (storage, *place, tensor.requires_grad, OrderedDict())


def without_origin(original: Any) -> Any:
    """torch._utils._get_obj_state without our own attribute: where a tensor was born is nobody's data."""

    def _get_obj_state(obj: Any) -> Any:
        found = original(obj)
        if isinstance(found, dict) and origin.ATTRIBUTE in found:
            found = {name: value for name, value in found.items() if name != origin.ATTRIBUTE}
        return found

    return _get_obj_state


def rebuild_tensor(original: Any) -> Any:
    """torch._utils._rebuild_tensor that makes a virtual tensor of a storage marked as virtual."""

    def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        from trimtab.virtual.tensor import wrap

        untyped = storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage
        machine = state.machine()
        if not isinstance(untyped, VirtualStorage) or machine is None:
            return original(storage, offset, size, stride)  # type: ignore[no-any-return]
        with torch._C.DisableTorchFunction():
            payload = torch.empty(0, dtype=storage.dtype, device="cpu")
            payload.set_(untyped, offset, tuple(size), tuple(stride))
        return wrap(payload, machine.device(untyped.device))

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
        return label_storage(storage, machine.device(torch.device("cuda", index)).device)

    return default_restore_location


def _storage_cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:
    machine = state.machine()
    assert machine is not None
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return label_storage(cpu_copy(self), machine.device(target).device)


def _storage_to(original: Any) -> Any:
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device)
        if target.type == "cuda":
            return _storage_cuda(self, target)
        return self.cpu() if isinstance(self, VirtualStorage) else original(self, device=device)

    return to


def patches(machine: state.Machine) -> list[tuple[object, str, object]]:
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
