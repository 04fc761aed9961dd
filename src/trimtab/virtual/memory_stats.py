"""Memory statistics of virtual GPUs in the form in which torch's C layer gives them to `torch.cuda`.

They are read from the allocator of each device (allocator.py). Counts nothing itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.virtual import allocator_settings, state
from trimtab.virtual.allocator import Allocator
from trimtab.virtual.allocator_parts import SHARED, Figures, Piece, PoolId
from trimtab.virtual.memory_trace import Trace
from trimtab.virtual.state import Machine, Patch

_LONGEST = 1_000_000
"""Deeds of an allocator's history, where the program names no number."""
_NAMES = ("allocated", "allocations", "requested", "reserved", "segments", "splits", "split_bytes")


class Statistics:
    """Reads and sets the allocators of one machine's devices."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._since: dict[int, dict[tuple[str, str], tuple[int, int]]] = {}
        """What had come by the time that the program set these figures back, and what was there."""
        self._traces: dict[int, Trace] = {}

    def record(
        self,
        enabled: str | None,
        context: str | None = None,
        stacks: str = "all",
        max_entries: int = 1 << 63,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """torch.cuda.memory._record_memory_history: of "state" no history is kept, nor of the host's memory."""
        for device in self.machine.devices:
            pool, trace = self._pool(device.index), self._traces.setdefault(device.index, Trace())
            if enabled == "all" and record_cuda:
                trace.begin(pool, min(max_entries, _LONGEST), clear_history, skip_actions)
            else:
                trace.end(pool)

    def _pool(self, index: int) -> Allocator:
        """The allocator of a device, with everything carried out that was noted."""
        device = self.machine.at(index)
        device.ledger.settle()
        return device.pool

    def _pools(self) -> list[Allocator]:
        return [self._pool(device.index) for device in self.machine.devices]

    def empty_cache(self, pool: PoolId | None = None) -> None:
        for allocator in self._pools():
            allocator.give_back(pool if pool not in (None, SHARED) else None)
        self._bound_again()

    def _bound_again(self) -> None:
        for device in self.machine.devices:
            device.ledger.settle()

    def reset_peak(self, index: int) -> None:
        pool, device = self._pool(index), self.machine.at(index)
        device.used |= pool.both.allocated_peak > 0
        for figures in (pool.both, pool.small_pool, pool.large_pool, pool.oversize):
            for name in _NAMES:
                setattr(figures, f"{name}_peak", getattr(figures, name))

    def reset_accumulated(self, index: int) -> None:
        pool = self._pool(index)
        pools: dict[str, tuple[Figures, ...]] = {"all": (pool.small_pool, pool.large_pool)}
        pools |= {"small_pool": (pool.small_pool,), "large_pool": (pool.large_pool,)}
        self._since[index] = {
            (title, name): (sum(_gained(p, name) for p in parts), sum(getattr(p, name) for p in parts))
            for title, parts in pools.items()
            for name in _NAMES
        }
        pool.retries = pool.ooms = pool.synchronized = pool.device_allocs = pool.device_frees = 0

    def set_fraction(self, fraction: float, index: int) -> None:
        pool = self._pool(index)
        pool.allowed = int(fraction * pool.total)
        self._bound_again()

    def fraction(self, index: int) -> float:
        pool = self._pool(index)
        return pool.allowed / pool.total if pool.allowed is not None else 1.0

    def configure(self, text: str) -> None:
        """torch.cuda.memory._set_allocator_settings."""
        for pool in self._pools():
            pool.configure(allocator_settings.parsed(text, pool.settings))
        self._bound_again()

    def info(self, index: int | None = None) -> tuple[int, int]:
        """(free, total) as cudaMemGetInfo says: what the allocator keeps and CUDA's own share are not free."""
        device = self.machine.at(index)
        return max(0, device.total_bytes - device.context_bytes - device.reserved), device.total_bytes

    def nested(self, index: int) -> dict[str, Any]:
        pool = self._pool(index)
        since = self._since.get(index, {})
        small, large = pool.small_pool, pool.large_pool
        waiting = _waiting(pool)

        def each(name: str, waits: int | None = None) -> dict[str, dict[str, int]]:
            found = {}
            for title, figures, parts in (
                ("all", pool.both, (small, large)),
                ("small_pool", small, (small,)),
                ("large_pool", large, (large,)),
            ):
                late = waiting[title][waits] if waits is not None else 0
                gained = sum(_gained(part, name) for part in parts)
                found[title] = _said_of(figures, name, gained, late, since.get((title, name), (0, 0)))
            return found

        return {
            "allocation": each("allocations"),
            "segment": each("segments"),
            "active": each("allocations", 0),
            "inactive_split": each("splits"),
            "allocated_bytes": each("allocated"),
            "reserved_bytes": each("reserved"),
            "active_bytes": each("allocated", 1),
            "inactive_split_bytes": each("split_bytes"),
            "requested_bytes": each("requested"),
            **{
                f"oversize_{name}": _said_of(pool.oversize, name, _gained(pool.oversize, name), 0, (0, 0))
                for name in ("allocations", "segments")
            },
            "num_alloc_retries": pool.retries,
            "num_ooms": pool.ooms,
            "num_sync_all_streams": pool.synchronized,
            "num_device_alloc": pool.device_allocs,
            "num_device_free": pool.device_frees,
            "num_oom_rejections": 0,
            # C++ shows the largest number there is as -1.
            "max_split_size": _signed(pool.settings.max_split),
        }

    def snapshot(self, only: Any = None, *_: Any, **__: Any) -> dict[str, Any]:
        """Every segment with its blocks and addresses; of one private pool where one is named."""
        wanted = tuple(only[:2]) if only is not None else SHARED
        segments = [
            _segment(device.index, run, {piece.address for piece in device.pool.waiting})
            for device in self.machine.devices
            for run in self._pool(device.index).segments()
            if wanted == SHARED or run[0].home.pool == wanted
        ]
        settings = self.machine.devices[0].pool.settings if self.machine.devices else None
        return {
            "segments": segments,
            "device_traces": [
                self._traces[device.index].told() if device.index in self._traces else []
                for device in self.machine.devices
            ],
            "allocator_settings": _said(settings) if settings is not None else {},
            "external_annotations": [],
        }


def _gained(figures: Figures, name: str) -> int:
    return int(getattr(figures, f"{name}_gained"))


def _said_of(
    figures: Figures, name: str, gained: int, waiting: int, since: tuple[int, int]
) -> dict[str, int]:
    """One figure as torch says it: now, at most, and what came and went since that was last set back."""
    current = getattr(figures, name) + waiting
    came = gained - since[0]
    peak = max(getattr(figures, f"{name}_peak"), current)
    return {"current": current, "peak": peak, "allocated": came, "freed": came - (current - since[1])}


def _waiting(pool: Allocator) -> dict[str, tuple[int, int]]:
    """Number and bytes of the pieces that were freed and may be in use on another stream."""
    small = [piece.size for piece in pool.waiting if piece.home.small]
    large = [piece.size for piece in pool.waiting if not piece.home.small]
    found = {"all": small + large, "small_pool": small, "large_pool": large}
    return {title: (len(sizes), sum(sizes)) for title, sizes in found.items()}


def _signed(size: int) -> int:
    return size if size < 1 << 63 else -1


def _segment(index: int, run: list[Piece], late: set[int]) -> dict[str, Any]:
    head = run[0]
    active = [piece for piece in run if not piece.free]
    return {
        "device": index,
        "address": head.address,
        "total_size": sum(piece.size for piece in run),
        "allocated_size": sum(piece.size for piece in active if piece.address not in late),
        "active_size": sum(piece.size for piece in active),
        "requested_size": sum(piece.requested for piece in active),
        "stream": head.home.stream,
        "segment_type": "small" if head.home.small else "large",
        "segment_pool_id": head.home.pool,
        "is_expandable": head.grows,
        "frames": [],
        "blocks": [
            {
                "address": piece.address,
                "size": piece.size,
                "requested_size": piece.requested,
                "state": "inactive"
                if piece.free
                else "active_pending_free"
                if piece.address in late
                else "active_allocated",
                "frames": [],
            }
            for piece in run
        ],
    }


def _said(settings: allocator_settings.Settings) -> dict[str, Any]:
    """The settings by the names under which torch shows them."""
    sizes = (str(1 << power) for power in range(16))
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.text,
        "max_split_size": _signed(settings.max_split),
        "garbage_collection_threshold": settings.collect_above,
        "expandable_segments": settings.expandable,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": dict(zip(sizes, settings.divisions, strict=True)),
    }


_pools = itertools.count(1)


class Pool:
    """torch.cuda.MemPool: memory that only requests made for it are met from."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.allocator = allocator
        self.id = (0, next(_pools))

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        return torch.cuda.memory_snapshot(self.id)  # type: ignore[no-any-return]

    def __del__(self, machine: Callable[[], Machine | None] = state.machine) -> None:
        in_force = machine()
        for device in in_force.devices if in_force is not None else ():
            device.ledger.settle()
            device.pool.let_go(self.id)


def _route(machine: Machine) -> Callable[..., None]:
    def begin(index: int, pool: PoolId) -> None:
        device = machine.at(index)
        device.ledger.settle()
        device.pool.select(device.pool.stream, pool)

    return begin


def pool_patches(machine: Machine) -> list[Patch]:
    """What torch.cuda knows of pools: it took the names when it was imported."""
    cuda, begin = torch.cuda, _route(machine)

    def patched(name: str) -> Callable[..., None]:
        if name.startswith("_cuda_begin"):
            return begin
        if name.startswith("_cuda_end"):
            return lambda index, _: begin(index, SHARED)
        return lambda *_: None

    routing = [
        name for name in vars(cuda.memory) if name.endswith(("AllocateToPool", "ThreadToPool", "releasePool"))
    ]
    return [
        *((owner, "MemPool", Pool) for owner in (cuda, cuda.memory)),
        *((cuda.memory, name, patched(name)) for name in routing),
        (cuda.graphs, "_graph_pool_handle", lambda: (0, next(_pools))),
    ]
