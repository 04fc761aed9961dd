"""The memory behind tensors on virtual GPUs: one block for each storage, freed when the last tensor on it goes.

A block is noted as it comes and goes (ledger.py); what CUDA's allocator makes of it (allocator.py) is worked out when
somebody asks, and for each block at once where the device is nearly full.
"""

from __future__ import annotations

import mmap
import re
from typing import Any

import torch

from trimtab.virtual import faults, streams
from trimtab.virtual.allocator import NoRoom
from trimtab.virtual.ledger import LARGEST_REST
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

    __slots__ = ("device", "held", "kind", "nbytes", "serial", "unknown")

    held: torch.Tensor
    """Memory of the host behind a shape there, once its address was asked for."""
    nbytes: int
    """What was asked for; nothing is allocated for nought bytes."""
    serial: int
    """The number of the allocation on its device."""
    kind: str
    """What it is for, once the ledger was told."""

    def __init__(self, device: VirtualDevice, nbytes: int) -> None:
        device = device.aside or device
        self.device = device
        self.unknown = False  # whether what it holds was written from values that nobody computed (shapes.py)
        self.nbytes = 0
        if not nbytes:
            self.serial = -1
            return
        device.room -= nbytes + LARGEST_REST
        if device.room < 0:
            _admit(self, device, nbytes)
            return
        # No call stands between reading and writing, so other threads cannot come in between.
        self.nbytes = nbytes
        self.serial = device.made
        device.made += 1
        device.held += nbytes
        device.log(nbytes)
        if device.held > device.watch:
            device.ledger.look()

    def __del__(self) -> None:
        if self.nbytes:
            device = self.device
            device.held -= self.nbytes
            device.log(~self.serial)

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        return self


def _note(block: Block, device: VirtualDevice, nbytes: int) -> None:
    block.serial = device.made
    block.nbytes = nbytes
    device.made += 1
    device.held += nbytes
    device.log(nbytes)


def _admit(block: Block, device: VirtualDevice, nbytes: int) -> None:
    """Allocate where it has to be known now whether it fits."""
    pool, ledger = device.pool, device.ledger
    with pool.lock:
        if device.apart:
            streams.serve(device)
        ledger.settle()
        _note(block, device, nbytes)
        try:
            ledger.settle()
        except NoRoom:
            block.nbytes = 0
            device.held -= nbytes
            exhausted(device, nbytes)
            pool.beyond = True
            _note(block, device, nbytes)
            ledger.settle()
        finally:
            pool.beyond = False
    if device.held > device.watch:
        ledger.look()


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
            noughts = mmap.mmap(-1, max(1, block.nbytes), mmap.MAP_PRIVATE)
            block.held = torch.frombuffer(noughts, dtype=torch.uint8)
    return block.held.data_ptr()


def resize(block: Block, nbytes: int) -> None:
    """The storage behind a block has grown or shrunk: memory for the new size is taken before the old is freed."""
    if nbytes == block.nbytes:
        return
    other = Block(block.device, nbytes)
    block.nbytes, other.nbytes = other.nbytes, block.nbytes
    block.serial, other.serial = other.serial, block.serial
    if nbytes and hasattr(block, "kind"):
        block.device.ledger.kinds[block.serial] = block.kind


def ensure(device: VirtualDevice, nbytes: int) -> None:
    """Fail now, before the payload is made, if an allocation cannot fit."""
    if nbytes + LARGEST_REST > device.room:
        device.ledger.settle()
        if not device.pool.room_for(nbytes):
            device.pool.refuse()
            exhausted(device, nbytes)


def exhausted(device: VirtualDevice, nbytes: int) -> None:
    """Report that an allocation does not fit: raises, unless the machine repairs."""
    pool = device.pool
    wanted = pool.segment_size(pool.settings.rounded(nbytes))
    in_use = device.context_bytes + pool.both.reserved
    allowed = f"{human(pool.allowed)} allowed; " if pool.allowed is not None else ""
    private = pool.unused_in_private_pools()
    unused = pool.both.reserved - pool.both.allocated
    pools = f"with {human(private)} allocated in private pools (e.g., CUDA Graphs), " if private else ""
    message = (
        f"CUDA out of memory. Tried to allocate {human(wanted)}. GPU {device.index} has a total capacity of "
        f"{human(device.total_bytes)} of which {human(max(device.total_bytes - in_use, 0))} is free. Including "
        f"non-PyTorch memory, this process has {human(in_use)} memory in use. {allowed}Of the allocated memory "
        f"{human(pool.both.allocated)} is allocated by PyTorch, {pools}and {human(unused)} is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
        "  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    faults.report("out-of-memory", message, "alloc", raises=torch.OutOfMemoryError)


SMALL_HOST = "This machine has too little memory"
"""How a refusal begins that is this machine's."""
_WANTED = re.compile(r"tried to allocate (\d+) bytes")


def refuse_on_small_host(error: Exception) -> None:
    """Where this machine could not hold the values of a tensor, say so: it is no fault of the program."""
    if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
        return
    wanted = _WANTED.search(str(error))
    size = f" ({human(int(wanted.group(1)))} more were asked for)" if wanted else ""
    raise NotSimulated(
        f"{SMALL_HOST} for the values that the program has on virtual GPUs{size}. Rehearse "
        "shapes only (--shapes-only, virtual_gpus(shapes=True)), or a smaller model or batch."
    ) from error


def human(nbytes: int) -> str:
    """A size in the allocator's own format."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes > _UNITS[unit.lower()]:
            return f"{nbytes / _UNITS[unit.lower()]:.2f} {unit}"
    return f"{nbytes} bytes"
