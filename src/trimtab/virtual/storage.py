"""The storage of a virtual tensor: the payload's own, saying that it is on a virtual GPU. It never holds a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.virtual import memory

# unknown.py puts here what answers for bytes that are not there; it stands above this module.
_bytes_for: Callable[[int], torch.UntypedStorage]


def set_bytes_for(give: Callable[[int], torch.UntypedStorage]) -> None:
    """Say what stands in for the bytes of a storage that has a size and no memory."""
    global _bytes_for
    _bytes_for = give


def is_shape(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has a size and no memory."""
    return bool(torch.UntypedStorage.device.__get__(storage).type == "meta")


def address(storage: torch.UntypedStorage) -> int:
    """A number in the place of the address of memory that is not there: of each storage its own."""
    return int(storage._cdata) << 12


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
        try:
            made = super().resize_(size)
        except RuntimeError as error:
            memory.refuse_on_small_host(error)
            raise
        block = getattr(self, "_virtual_block", None)
        if block is not None:
            memory.resize(block, size)
        return made

    def data_ptr(self) -> int:
        if is_shape(self):
            # No memory is there; who compares addresses sees which tensors share one.
            block: Any = getattr(self, "_virtual_block", None)
            on_host = self.device.type == "cpu" and block is not None
            return memory.host_address(block) if on_host else address(self)
        return super().data_ptr()

    def cpu(self) -> torch.UntypedStorage:
        made = cpu_copy(self)
        if is_hollow(self):
            made._unknown = True  # type: ignore[attr-defined]
        return made

    def tolist(self) -> list[int]:
        values: list[int] = _bytes_for(self.nbytes()).tolist() if is_shape(self) else super().tolist()
        return values

    def _write_file(self, *args: Any) -> None:
        # Plain pickling and torch's old format, which have no holes.
        if is_shape(self):
            _bytes_for(self.nbytes())._write_file(*args)
        else:
            super()._write_file(*args)

    def clone(self) -> torch.UntypedStorage:
        return label_storage(cpu_copy(self), self.device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.UntypedStorage:
        # Asked for by a copy of the payload, which torch makes over a storage of its own class only.
        seen = memo.setdefault("torch", {})
        if self._cdata not in seen:
            seen[self._cdata] = cpu_copy(self)
        return seen[self._cdata]  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        # Reached by plain pickling and by multiprocessing; torch.save writes the bytes itself.
        return _storage_from, (bytes(self.tolist()), str(self.device))

    def __repr__(self) -> str:
        return f"[torch.storage.UntypedStorage(device={self.device}) of size {len(self)}]"


class ShellStorage(VirtualStorage):
    """The storage of a tensor that wraps another and has no memory itself, as a sharded one."""

    def data_ptr(self) -> int:
        raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")


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


def is_hollow(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has no values, or none to be trusted."""
    block: Any = getattr(storage, "_virtual_block", None)
    return is_shape(storage) or getattr(storage, "_unknown", False) or (block is not None and block.unknown)


def hollow_storage(size: int) -> torch.UntypedStorage:
    """The storage of a tensor on the host that has a shape only."""
    with torch._C.DisableTorchFunction():
        made = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
    return label_storage(made, torch.device("cpu"))


def cpu_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A CPU storage with the same bytes: an ordinary one, or one of the same size where there are none."""
    if is_shape(storage):
        return hollow_storage(storage.nbytes())
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).clone().untyped_storage()
