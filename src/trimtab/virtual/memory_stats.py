"""Memory statistics of virtual GPUs in the form that `torch.cuda.memory_stats` gives them.

Bytes in use are counted (see memory.py); what the caching allocator keeps beyond them is modelled as the highest
use since the last `empty_cache`, in segments of 2 MiB. Never models fragmentation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch

from trimtab.virtual.state import Machine, Patch
from trimtab.virtual.wording import words

SEGMENT = 2 << 20
# What is not modelled.
_COUNTS = words("num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free")


def _segments(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


class Statistics:
    """Reads the counters of one machine's devices."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._reserved: Counter[int] = Counter()
        self._peak_reserved: Counter[int] = Counter()
        self._peak_when_emptied: Counter[int] = Counter()
        self._fraction: dict[int, float] = {}

    def reserved(self, index: int) -> int:
        device = self.machine.at(index)
        highest = device.peak if device.peak > self._peak_when_emptied[index] else device.allocated
        self._reserved[index] = max(self._reserved[index], _segments(highest))
        self._peak_reserved[index] = max(self._peak_reserved[index], self._reserved[index])
        return self._reserved[index]

    def empty_cache(self) -> None:
        for device in self.machine.devices:
            self.reserved(device.index)
            self._reserved[device.index] = _segments(device.allocated)
            self._peak_when_emptied[device.index] = device.peak

    def reset_peak(self, index: int) -> None:
        device = self.machine.at(index)
        self._peak_reserved[index] = self.reserved(index)
        device.used |= device.peak > 0
        self._peak_when_emptied[index] = device.peak = device.allocated

    def set_fraction(self, fraction: float, index: int) -> None:
        device = self.machine.at(index)
        self._fraction[index] = fraction
        device.limit_bytes = int(fraction * device.total_bytes)

    def fraction(self, index: int) -> float:
        return self._fraction.get(index, 1.0)

    def info(self, index: int) -> tuple[int, int]:
        """(free, total) as cudaMemGetInfo says: what the allocator keeps is not free."""
        device = self.machine.at(index)
        return max(0, device.total_bytes - self.reserved(index)), device.total_bytes

    def nested(self, index: int) -> dict[str, Any]:
        device, reserved = self.machine.at(index), self.reserved(index)

        def figures(current: int, peak: int) -> dict[str, int]:
            return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}

        def pools(current: int, peak: int) -> dict[str, dict[str, int]]:
            both = figures(current, peak)
            return {"all": both, "small_pool": figures(0, 0), "large_pool": both}

        used = pools(device.allocated, device.peak)
        return {
            **dict.fromkeys(("allocated_bytes", "requested_bytes", "active_bytes"), used),
            "reserved_bytes": pools(reserved, self._peak_reserved[index]),
            "inactive_split_bytes": pools(max(0, reserved - device.allocated), 0),
            **dict.fromkeys(("allocation", "active", "inactive_split"), pools(0, 0)),
            "segment": pools(reserved // SEGMENT, self._peak_reserved[index] // SEGMENT),
            **dict.fromkeys(("oversize_allocations", "oversize_segments"), figures(0, 0)),
            **dict.fromkeys(_COUNTS, 0),
            "max_split_size": -1,
        }

    def snapshot(self, *_: Any) -> dict[str, Any]:
        """One segment per device: which tensor lies where inside it is not modelled."""
        segments = [
            {
                "device": device.index,
                "address": 0,
                "total_size": self.reserved(device.index),
                **dict.fromkeys(("allocated_size", "active_size", "requested_size"), device.allocated),
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


_pools = itertools.count(1)


class Pool:
    """torch.cuda.MemPool. Nothing is fragmented here, so a pool is a name and no more."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.allocator = allocator
        self.id = (0, next(_pools))

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        return []


def pool_patches() -> list[Patch]:
    """What torch.cuda knows of pools: it took the names when it was imported."""
    cuda = torch.cuda
    routing = [
        name for name in vars(cuda.memory) if name.endswith(("AllocateToPool", "ThreadToPool", "releasePool"))
    ]
    return [
        *((owner, "MemPool", Pool) for owner in (cuda, cuda.memory)),
        *((cuda.memory, name, lambda *_: None) for name in routing),
        (cuda.graphs, "_graph_pool_handle", lambda: (0, next(_pools))),
    ]
