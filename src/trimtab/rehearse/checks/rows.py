"""The rows that ranks read: writes down fingerprints of batches and of what the model is fed, for the parent to compare
(see `same_rows`). Of ranks it decides nothing; of a loader's workers it tells by itself when two of them begin alike.
Changes no batch."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from trimtab.diagnose import mends_rows, raised_batches, rows
from trimtab.diagnose.finding import Finding, Place, cause_at, place_from
from trimtab.rehearse import agreement, places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, world_size
from trimtab.virtual.tensor import payload_of

_STEPS = 8
_VALUES = 8
_ROWS = 2048
_BYTES = 1 << 16


class Rows(BaseCheck):
    """Follows every DataLoader of a rank."""

    def install(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._iterates: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._handed: WeakKeyDictionary[Any, dict[int, list[tuple[list[int], int]]]] = WeakKeyDictionary()
        """By iterator and worker, the first batches of a stream: a number for each row, and how many values."""
        self._seen: dict[int, list[int]] = {}
        self._last: Any = None
        self._giver: Any = None
        self._trained: Any = None
        self._fed: list[int] = []
        self._awaits = False
        self._steps: Counter[str] = Counter()
        self._drawn: dict[str, dict[str, Any]] = {}
        """The rows that each loader gave in its first pass, as numbers: when the script ends it may be gone."""
        self._passes: Counter[int] = Counter()
        self._loaders = 0
        self._samplers: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()
        self._splits: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()
        around(DistributedSampler, "__init__", self._sampled)
        around(Subset, "__init__", self._split)
        around(DataLoader, "__init__", self._made)
        around(_BaseDataLoaderIter, "__init__", self._begun)
        around(_BaseDataLoaderIter, "_next_index", self._indexed)
        around(_BaseDataLoaderIter, "__next__", self._fetch)
        around(_MultiProcessingDataLoaderIter, "_process_data", self._hand_over)
        nn.modules.module.register_module_forward_pre_hook(self._called)
        backward_hub().before.append(self._backward)
        register_optimizer_step_pre_hook(self._step)

    def _made(self, real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        place = places.here()
        real(loader, *args, **kwargs)
        self._known[loader] = {
            "place": asdict(place) if place else None,
            "iterable": isinstance(loader.dataset, IterableDataset),
            "sampler": self._sampler(getattr(loader, "sampler", None)),
            "split": self._part(loader.dataset),
            "sliced": _sliced(place, loader.dataset),
            "name": f"{place.file}:{place.line}:{self._loaders}" if place else "",
        }
        self._loaders += 1

    def _sampled(self, real: Any, sampler: Any, *args: Any, **kwargs: Any) -> None:
        real(sampler, *args, **kwargs)
        self._samplers[sampler] = places.here()

    def _split(self, real: Any, subset: Any, *args: Any, **kwargs: Any) -> None:
        real(subset, *args, **kwargs)
        self._splits[subset] = places.here()

    def _sampler(self, sampler: Any) -> dict[str, Any] | None:
        if not isinstance(sampler, DistributedSampler):
            return None
        place = self._samplers.get(sampler)
        seed = sampler.seed if sampler.shuffle else 0
        return {"place": asdict(place) if place else None, "seed": seed}

    def _part(self, data: Any) -> dict[str, Any] | None:
        """Which rows a data set takes of another one, and the line that chose them."""
        if not isinstance(data, Subset):
            return None
        place = self._splits.get(data)
        chosen = zlib.crc32(repr(list(map(int, data.indices))).encode())
        return {"place": asdict(place) if place else None, "print": chosen}

    def _begun(self, real: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if not self._passes and loader.batch_sampler is not None:
            self.process.recorder.write(t="batches-loaded")
        self._iterates[iterator] = loader
        self._passes[id(loader)] += 1
        real(iterator, loader, *args, **kwargs)

    def _indexed(self, real: Any, iterator: Any) -> Any:
        """Which rows of the whole data set are asked for, where a DistributedSampler chose them."""
        chosen = real(iterator)
        loader = self._iterates.get(iterator)
        known = self._known.get(loader) if loader is not None else None
        if loader is not None and known is not None and known["sampler"]:
            numbers = chosen if isinstance(chosen, list | tuple) else [chosen]
            self._draw(loader, known, [_whole(loader.dataset, n) for n in numbers])
        return chosen

    def _draw(self, loader: Any, known: dict[str, Any], ids: list[int]) -> None:
        drawn = self._drawn.setdefault(known["name"], {"drawn": known["name"], "ids": [], "loader": known})
        if self._passes[id(loader)] == 1 and known["name"] and len(drawn["ids"]) < _ROWS:
            drawn["ids"] += ids

    def _fetch(self, real: Any, iterator: Any) -> Any:
        batch = real(iterator)
        self._giver = loader = self._iterates.get(iterator)
        if loader is not None and world_size() > 1 and sum(self._steps.values()) < 4 * _STEPS:
            self._last, self._awaits = loader, True
            self._seen.setdefault(id(loader), []).append(_print(batch))
            known = self._known.get(loader)
            if known is not None and known["sliced"] and not known["sampler"]:
                self._draw(loader, known, _prints(batch))
        return batch

    def _hand_over(self, real: Any, iterator: Any, data: Any, worker: int) -> Any:
        """A stream that every worker gives whole: its first batches are those of another worker."""
        batch, loader = real(iterator, data, worker), self._iterates.get(iterator)
        if loader is None or not isinstance(loader.dataset, IterableDataset) or loader not in self._known:
            return batch
        handed = self._handed.setdefault(iterator, {})
        mine = handed.setdefault(worker, [])
        if len(mine) < 2 or sum(n for _, n in mine) < _VALUES:
            mine.append(
                (_prints(batch) or [_print(batch)], sum(tensor.numel() for tensor in _tensors(batch)))
            )
            # Rows that are all alike tell nothing: they are so wherever they come from.
            tells = (
                len(mine) > 1
                and len({row for prints, _ in mine for row in prints}) > 1
                and sum(n for _, n in mine) >= _VALUES
            )
            if tells and any(other == mine for n, other in handed.items() if n != worker):
                self._whole_stream(loader, place_from(self._known[loader]["place"]))
        return batch

    def _whole_stream(self, loader: Any, place: Place | None) -> None:
        fix, n = mends_rows.among_workers(rows.method_of_rows(loader.dataset)), loader.num_workers
        self.report(
            "same-rows",
            f"The {n} workers of this DataLoader give the same rows, so that each row comes {n} times: the first "
            "batches of two of them are equal.",
            place,
            cause_at(fix.place or place, "every worker goes through all rows of the stream"),
            fix.text,
            "DataLoader",
            once=f"{place}",
            edits=fix.edits,
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """A batch of one row that batch norm refuses: the line that made the loader which gave it."""
        made = self._known.get(self._giver, {}).get("place") if self._giver is not None else None
        said = raised_batches.lone_row(error, self._giver, Place(**made)) if error and made else None
        return replace(finding, cause=said.cause, fix=said.fix, edits=said.edits) if said else finding

    def _called(self, module: nn.Module, args: Any) -> None:
        if self._awaits and torch.is_grad_enabled() and (tensors := _tensors(args)):
            self._awaits = False
            self._fed.append(_print(tensors))

    def finish(self) -> None:
        for record in self._drawn.values():
            agreement.note(self.process, record)

    def _backward(self, roots: Any, place: Any) -> None:
        self._trained = self._last

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        loader, self._trained = self._trained, None
        known = self._known.get(loader) if loader is not None else None
        seen, fed = self._seen.get(id(loader), []), self._fed
        self._seen, self._fed = {}, []
        if known is None or known["place"] is None or not seen:
            return
        key = f"{known['place']['file']}:{known['place']['line']}"
        self._steps[key] += 1
        if self._steps[key] <= _STEPS:
            record = {"rows": key, "n": self._steps[key], "seen": seen, "fed": fed, "loader": known}
            agreement.note(self.process, record)


def _sliced(place: Place | None, data: Any) -> dict[str, Any] | None:
    """The line, in the files of a loader and of its data set, that takes this rank's part of the rows."""
    method = rows.method_of_rows(data)
    files = [at.file for at in (place, method) if at is not None]
    found = next((at for file in files if (at := mends_rows.sliced_by_rank(file)) is not None), None)
    return asdict(found) if found is not None else None


def _whole(data: Any, number: Any) -> int:
    """The number of a row in the data set that others take their parts of."""
    while isinstance(data, Subset):
        data, number = data.dataset, data.indices[number]
    return int(number)


def _prints(batch: Any) -> list[int]:
    """A number for the contents of each row of a batch; none where it has no rows of tensors."""
    tensors = [tensor for tensor in _tensors(batch) if tensor.dim()]
    count = len(tensors[0]) if tensors else 0
    if any(len(tensor) != count for tensor in tensors):
        return []
    return [_print([tensor[n] for tensor in tensors]) for n in range(count)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _print(value: Any) -> int:
    """A number for the contents of a batch."""
    number = 0
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            number = zlib.crc32(_bytes(leaf), number)
        elif isinstance(leaf, str | int | float | bytes):
            number = zlib.crc32(repr(leaf).encode(), number)
    return number


def _bytes(tensor: torch.Tensor) -> bytes:
    values = payload_of(tensor.detach())
    if (
        values.is_meta
        or values.layout is not torch.strided
        or type(values) not in (torch.Tensor, nn.Parameter)
    ):
        return repr(tuple(tensor.shape)).encode()
    with torch.no_grad(), torch._C.DisableTorchFunction():
        flat = values.reshape(-1).contiguous().view(torch.uint8)
        # Of a big one, its beginning and every so many bytes.
        rest = flat[:: max(1, flat.numel() // _BYTES)]
        return bytes(flat[:_BYTES].numpy().tobytes() + rest.numpy().tobytes())
