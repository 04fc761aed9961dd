"""Bytes per virtual device: counted by storage, freed when the last tensor on the storage goes.

It counts what the tensors of the program hold. It does not imitate the caching allocator: no fragmentation, no
reserved pool, no workspace of kernels.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from trimtab.virtual import faults
from trimtab.virtual.state import NotSimulated, VirtualDevice

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: str | int) -> int:
    """Bytes from a number or from text such as "80GiB" or "24 GB"."""
    if isinstance(size, int):
        if size <= 0:
            raise ValueError(f"memory of a virtual GPU must be positive, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"cannot read {size!r} as an amount of memory; write for example '80GiB' or '24GB'")
    return int(float(match.group(1)) * unit)


class Block:
    """One allocation. All virtual tensors that alias a storage share its block; dropping the last one frees it."""

    __slots__ = ("device", "held", "nbytes", "serial", "unknown")

    held: torch.Tensor
    """Memory of the host behind a shape there, once its address was asked for."""

    def __init__(self, device: VirtualDevice, nbytes: int) -> None:
        # CUDA's allocator hands out multiples of 512 bytes.
        nbytes = (nbytes + 511) & -512
        device = device.aside or device
        self.device = device
        self.nbytes = 0
        self.unknown = False  # whether what it holds was written from values that nobody computed (shapes.py)
        total = device.allocated + nbytes
        if total > device.limit_bytes:
            exhausted(device, nbytes)
        self.nbytes = nbytes
        # No call stands between reading and writing, so other threads cannot come in between.
        ledger = device.ledger
        self.serial = ledger.made
        ledger.made += 1
        device.allocated += nbytes
        if total > device.peak:
            device.peak = total
        ledger.lap.events.append(nbytes)

    def __del__(self) -> None:
        if hasattr(self, "serial"):
            self.device.allocated -= self.nbytes
            self.device.ledger.lap.events.append(~self.serial)

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        return self


def move(block: Block, device: VirtualDevice) -> None:
    """Count an allocation on another device from now on."""
    nbytes, unknown = block.nbytes, block.unknown
    release(block)
    Block.__init__(block, device, nbytes)
    block.unknown = unknown


def release(block: Block) -> None:
    """An allocation ends before its last tensor does: nobody reads it any more."""
    if block.nbytes:
        Block.__del__(block)
        Block.__init__(block, block.device, 0)


def host_address(block: Block) -> int:
    """The address of a shape on the host: programs may read there, and find noughts. Unread, it takes no memory."""
    if not hasattr(block, "held"):
        with torch._C.DisableTorchFunction():
            block.held = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
    return block.held.data_ptr()


def resize(block: Block, nbytes: int) -> None:
    """The storage behind a block has grown or shrunk."""
    nbytes = (nbytes + 511) & -512
    device = block.device
    extra = nbytes - block.nbytes
    if extra > 0:
        ensure(device, extra)
    if not extra:
        return
    ledger, before = device.ledger, block.serial
    block.nbytes, block.serial = nbytes, ledger.made
    ledger.made += 1
    device.allocated += extra
    device.peak = max(device.peak, device.allocated)
    ledger.lap.events.append(nbytes)
    ledger.lap.events.append(~before)


def ensure(device: VirtualDevice, nbytes: int) -> None:
    """Fail now, before the payload is made, if an allocation cannot fit."""
    if device.allocated + nbytes > device.limit_bytes:
        exhausted(device, nbytes)


def exhausted(device: VirtualDevice, nbytes: int) -> None:
    """Report that an allocation does not fit: raises, unless the machine repairs."""
    free = max(device.total_bytes - device.allocated, 0)
    message = (
        f"CUDA out of memory. Tried to allocate {human(nbytes)}. GPU {device.index} has a total capacity of "
        f"{human(device.total_bytes)} of which {human(free)} is free. Including non-PyTorch memory, this process "
        f"has {human(device.allocated)} memory in use. Of the allocated memory {human(device.allocated)} is "
        "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    faults.report("out-of-memory", message, "alloc", raises=torch.OutOfMemoryError)


_WANTED = re.compile(r"tried to allocate (\d+) bytes")


def refuse_on_small_host(error: Exception) -> None:
    """Where this machine could not hold the values of a tensor, say so: it is no fault of the program."""
    if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
        return
    wanted = _WANTED.search(str(error))
    size = f" ({human(int(wanted.group(1)))} more were asked for)" if wanted else ""
    raise NotSimulated(
        f"This machine has too little memory for the values that the program has on virtual GPUs{size}. Rehearse "
        "shapes only (--shapes-only, virtual_gpus(shapes=True)), or a smaller model or batch."
    ) from error


def human(nbytes: int) -> str:
    """A size in the allocator's own format."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes > _UNITS[unit.lower()]:
            return f"{nbytes / _UNITS[unit.lower()]:.2f} {unit}"
    return f"{nbytes} bytes"
