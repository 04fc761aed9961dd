"""Asks the NVIDIA driver how much memory is free, by its own library. It never opens a CUDA context.

torch.cuda.mem_get_info opens one on every GPU it is asked about, and each takes about half a GiB there until the
process ends: with eight ranks that look at eight GPUs, four GiB of each.
"""

from __future__ import annotations

import ctypes
from functools import cache


class DriverMemory(ctypes.Structure):
    """The driver's own record, in bytes."""

    total: int
    free: int
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def driver_memory(uuid: str) -> DriverMemory | None:
    """Memory of the GPU `GPU-…`; None where the driver's library is not there or does not know this device."""
    library = _library()
    if library is None:
        return None
    handle, memory = ctypes.c_void_p(), DriverMemory()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return memory


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
