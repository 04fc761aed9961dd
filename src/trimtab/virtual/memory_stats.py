"""Memory statistics of virtual GPUs in the form that `torch.cuda.memory_stats` gives them.

Bytes in use are counted (see memory.py); what the caching allocator keeps beyond them is modelled as the highest
use since the last `empty_cache`, in segments of 2 MiB. Never models fragmentation.
"""

from __future__ import annotations

from typing import Any

from trimtab.virtual.state import Machine, VirtualDevice

SEGMENT = 2 << 20


def _segments(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


class Statistics:
    """Reads the counters of one machine's devices."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._reserved: dict[int, int] = {}
        self._peak_reserved: dict[int, int] = {}
        self._peak_when_emptied: dict[int, int] = {}
        self._fraction: dict[int, float] = {}

    def _device(self, index: int) -> VirtualDevice:
        return self.machine.at(index)

    def reserved(self, index: int) -> int:
        device = self._device(index)
        seen = _segments(device.allocated)
        if device.peak > self._peak_when_emptied.get(index, 0):
            seen = max(seen, _segments(device.peak))
        self._reserved[index] = max(self._reserved.get(index, 0), seen)
        self._peak_reserved[index] = max(self._peak_reserved.get(index, 0), self._reserved[index])
        return self._reserved[index]

    def empty_cache(self) -> None:
        for device in self.machine.devices:
            self.reserved(device.index)
            self._reserved[device.index] = _segments(device.allocated)
            self._peak_when_emptied[device.index] = device.peak

    def reset_peak(self, index: int) -> None:
        device = self._device(index)
        self._reserved[index] = self.reserved(index)
        device.peak = device.allocated
        self._peak_when_emptied[index] = device.peak
        self._peak_reserved[index] = self._reserved[index]

    def set_fraction(self, fraction: float, index: int) -> None:
        device = self._device(index)
        self._fraction[index] = fraction
        device.limit_bytes = int(fraction * device.total_bytes)

    def fraction(self, index: int) -> float:
        return self._fraction.get(index, 1.0)

    def info(self, index: int) -> tuple[int, int]:
        """(free, total) as cudaMemGetInfo says: what the allocator keeps is not free."""
        device = self._device(index)
        return max(0, device.total_bytes - self.reserved(index)), device.total_bytes

    def nested(self, index: int) -> dict[str, Any]:
        device = self._device(index)
        reserved = self.reserved(index)

        def figures(current: int, peak: int) -> dict[str, int]:
            return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}

        def pools(current: int, peak: int) -> dict[str, dict[str, int]]:
            return {
                "all": figures(current, peak),
                "small_pool": figures(0, 0),
                "large_pool": figures(current, peak),
            }

        used = pools(device.allocated, device.peak)
        return {
            "allocated_bytes": used,
            "requested_bytes": used,
            "active_bytes": used,
            "reserved_bytes": pools(reserved, self._peak_reserved[index]),
            "inactive_split_bytes": pools(max(0, reserved - device.allocated), 0),
            "allocation": pools(0, 0),
            "active": pools(0, 0),
            "segment": pools(reserved // SEGMENT, self._peak_reserved[index] // SEGMENT),
            "inactive_split": pools(0, 0),
            "oversize_allocations": figures(0, 0),
            "oversize_segments": figures(0, 0),
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "num_sync_all_streams": 0,
            "num_device_alloc": 0,
            "num_device_free": 0,
            "max_split_size": -1,
        }

    def snapshot(self, *_: Any) -> dict[str, Any]:
        """One segment per device: which tensor lies where inside it is not modelled."""
        segments = [
            {
                "device": device.index,
                "address": 0,
                "total_size": self.reserved(device.index),
                "allocated_size": device.allocated,
                "active_size": device.allocated,
                "requested_size": device.allocated,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [],
            }
            for device in self.machine.devices
        ]
        return {
            "segments": segments,
            "device_traces": [[] for _ in self.machine.devices],
            "allocator_settings": {},
        }
