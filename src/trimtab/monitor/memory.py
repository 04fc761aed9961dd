"""How much memory a run uses on the device that its plan names. Never looks for a device itself.

On the CPU the peak is that of the whole process since it started (loading the model included), because no system
lets a process set it back. On CUDA it is what PyTorch's allocator gave out. MPS keeps no peak: it is the largest of
the readings taken.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now, and the most so far."""

    now: int
    peak: int
    reserved: int | None = None
    """The most that CUDA's allocator took of the device, what it kept for later included."""


class MemoryMeter:
    """Reads the memory of one device, given as `cpu`, `cuda`, `cuda:N` or `mps`."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._largest = 0

    def read(self) -> MemoryUse:
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            # Empty before anything was put on the device.
            return MemoryUse(
                stats.get("allocated_bytes.all.current", 0),
                stats.get("allocated_bytes.all.peak", 0),
                stats.get("reserved_bytes.all.peak", 0),
            )
        if self.device.type == "mps":
            now = torch.mps.current_allocated_memory()
            self._largest = max(self._largest, now)
            return MemoryUse(now, self._largest)
        info = psutil.Process().memory_info()
        self._largest = max(self._largest, info.rss, _peak_of_process(info))
        return MemoryUse(info.rss, self._largest)


def _peak_of_process(info: object) -> int:
    if sys.platform == "win32":
        return int(getattr(info, "peak_wset", 0))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


def gpu_busy_share(device: str) -> float | None:
    """How busy the GPU is (0 to 1), or None where that is not known: no CUDA device, no `nvidia-ml-py`, no answer."""
    if torch.device(device).type != "cuda":
        return None
    try:
        return torch.cuda.utilization(torch.device(device)) / 100
    except (ModuleNotFoundError, RuntimeError):  # torch's own words where the driver's library does not load
        return None
    except Exception as error:
        # The library cannot tell for a slice of a GPU (MIG); its errors are of no other kind than Exception.
        if type(error).__name__.startswith(("NVMLError", "AmdSmi")):
            return None
        raise
