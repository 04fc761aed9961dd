"""Peak memory between two moments, on the devices that a plan names. Never looks for a device, and never estimates."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path

import psutil
import torch

from trimtab.placement import PlacementPlan

_SAMPLE_SECONDS = 0.002


class PeakMeter:
    """The most memory in use between `reset` and `read`, on the devices of a plan.

    On CUDA it is what PyTorch's allocator gave out, its context not included. On the CPU it is resident memory of the
    process less what it held when the meter was made, before the model: interpreter and libraries are left out, but
    what the memory allocator keeps of freed blocks is in.
    """

    def __init__(self, plan: PlacementPlan) -> None:
        self.kind, self.devices = plan.kind, plan.devices
        self.base = 0
        if self.kind == "cpu":
            _release_freed()
            self.base = psutil.Process().memory_info().rss
        self._resettable = self.kind == "cpu" and _reset_high_water()
        self._sampled = 0
        self._stop: threading.Event | None = None

    @property
    def how(self) -> str:
        if self.kind == "cuda":
            return "most bytes given out by PyTorch's allocator on the device; the CUDA context is not in it"
        where = "the process's resident memory less that before the model was there (interpreter, libraries)"
        if self.kind == "mps":
            where = "bytes given out by PyTorch's allocator on the device"
        if self._resettable:
            return f"peak of {where}, as the kernel counts it"
        return f"highest reading of {where}, every {1000 * _SAMPLE_SECONDS:.0f} ms: a shorter peak is missed"

    def reset(self) -> None:
        gc.collect()
        if self.kind == "cuda":
            for device in self.devices:
                torch.cuda.reset_peak_memory_stats(device)
            return
        _release_freed()
        if not self._resettable:
            self._sampled = self._now()
            if self._stop is None:
                self._stop = threading.Event()
                threading.Thread(target=self._sample, args=(self._stop,), daemon=True).start()
        else:
            _reset_high_water()

    def read(self) -> int:
        """Bytes; those of several devices added up."""
        if self.kind == "cuda":
            return sum(torch.cuda.max_memory_allocated(device) for device in self.devices)
        peak = _high_water() if self._resettable else max(self._sampled, self._now())
        return peak - self.base

    def close(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _now(self) -> int:
        if self.kind == "mps":
            return int(torch.mps.current_allocated_memory())
        return int(psutil.Process().memory_info().rss)

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            self._sampled = max(self._sampled, self._now())


def _reset_high_water() -> bool:
    """Linux lets a process set its peak back; whether that was done."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return _high_water() > 0


def _high_water() -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _release_freed() -> None:
    """Freed memory goes back to the system (glibc alone keeps it), or loading's would be taken for the steps'."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
