"""Asks the NVIDIA driver how much memory is free, by its own library. It never opens a CUDA context.

torch.cuda.mem_get_info opens one on every GPU it is asked about, and each takes about half a GiB there until the
process ends: with eight ranks that look at eight GPUs, four GiB of each.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class DriverMemory:
    total_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def driver_memory(uuid: str) -> DriverMemory | None:
    """Memory of the GPU `GPU-…`; None where the driver's library is not there or does not know this device."""
    library = _library()
    if library is None:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return DriverMemory(total_bytes=memory.total, free_bytes=memory.free)


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
