"""A data stream that every worker of a DataLoader gives whole: each row comes once per worker.

Compares what workers hand over by value, from each worker's first batch on: speaks where two of them begin alike. A
stream that shares out its rows, or draws them, never does. Fetches no row of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trimtab.diagnose import mends_rows, rows
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, plain_values

_BATCHES, _VALUES = 2, 8


@dataclass
class _Stream:
    """What the workers of one pass over a loader have given so far."""

    place: Place | None
    data: Any
    prints: dict[int, list[bytes]] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)

    def whole(self, worker: int) -> bool:
        return len(self.prints[worker]) >= _BATCHES and self.values[worker] >= _VALUES


class WorkerRows(BaseCheck):
    """Follows the workers of every loader of a stream."""

    def install(self) -> None:
        self._made: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()
        self._streams: WeakKeyDictionary[Any, _Stream] = WeakKeyDictionary()
        around(DataLoader, "__init__", self._make)
        around(_MultiProcessingDataLoaderIter, "__init__", self._begin)
        around(_MultiProcessingDataLoaderIter, "_process_data", self._give)

    def _make(self, real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        self._made[loader] = places.here()
        real(loader, *args, **kwargs)

    def _begin(self, real: Any, iterator: Any, loader: Any) -> None:
        if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:
            self._streams[iterator] = _Stream(self._made.get(loader), loader.dataset)
        real(iterator, loader)

    def _give(self, real: Any, iterator: Any, data: Any, worker: int) -> Any:
        batch = real(iterator, data, worker)
        stream = self._streams.get(iterator)
        if stream is None or (worker in stream.prints and stream.whole(worker)):
            return batch
        known = _print(batch)
        if known is None:
            del self._streams[iterator]
            return batch
        stream.prints.setdefault(worker, []).append(known[0])
        stream.values[worker] = stream.values.get(worker, 0) + known[1]
        mine = stream.prints[worker]
        # Batches that are all alike tell nothing: such rows are alike wherever they come from.
        if stream.whole(worker) and len(set(mine)) > 1:
            other = next((n for n, prints in stream.prints.items() if n != worker and prints == mine), None)
            if other is not None:
                self._tell(stream, iterator._num_workers, (other, worker))
        return batch

    def _tell(self, stream: _Stream, count: int, alike: tuple[int, int]) -> None:
        method = rows.method_of_stream(stream.data)
        fix = mends_rows.among_workers(method)
        self.report(
            "same-rows",
            f"The {count} workers of a DataLoader give the same rows: the first {len(stream.prints[alike[0]])} batches "
            f"of the workers {alike[0]} and {alike[1]} are equal. Each row comes {count} times.",
            stream.place or method,
            cause_at(fix.place or stream.place, "every worker goes through all rows of the stream"),
            fix.text,
            "DataLoader",
            once=f"{stream.place}",
            edits=fix.edits,
        )


def _print(batch: Any) -> tuple[bytes, int] | None:
    """A digest of all values of a batch, and how many there are; None where it holds what cannot be compared."""
    found, count = hashlib.blake2b(), 0
    for leaf in torch.utils._pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, torch.Tensor):
            values = plain_values(leaf) if leaf.layout is torch.strided else None
            if values is None:
                return None
            with torch.no_grad(), torch._C.DisableTorchFunction():
                found.update(f"{values.dtype}{tuple(values.shape)}".encode())
                found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            count += values.numel()
        elif leaf is None or isinstance(leaf, str | int | float | bytes):
            found.update(f"{leaf!r};".encode())
            count += leaf is not None
        else:
            return None
    return found.digest(), count
