"""The rows that ranks read: writes down fingerprints of batches and of what the model is fed, for the parent to compare
(see `same_rows`). It decides nothing, and changes no batch."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from trimtab.rehearse import agreement, places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, world_size
from trimtab.virtual.tensor import payload_of

_STEPS = 8
_BYTES = 1 << 16


class Rows(BaseCheck):
    """Follows every DataLoader of a rank."""

    def install(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._iterates: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._seen: dict[int, list[int]] = {}
        self._last: Any = None
        self._trained: Any = None
        self._fed: list[int] = []
        self._awaits = False
        self._steps: Counter[str] = Counter()
        around(DataLoader, "__init__", self._made)
        around(_BaseDataLoaderIter, "__init__", self._begun)
        around(_BaseDataLoaderIter, "__next__", self._fetch)
        nn.modules.module.register_module_forward_pre_hook(self._called)
        backward_hub().before.append(self._backward)
        register_optimizer_step_pre_hook(self._step)

    def _made(self, real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        place = places.here()
        real(loader, *args, **kwargs)
        self._known[loader] = {
            "place": asdict(place) if place else None,
            "iterable": isinstance(loader.dataset, IterableDataset),
            "sampler": isinstance(getattr(loader, "sampler", None), DistributedSampler),
        }

    def _begun(self, real: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        self._iterates[iterator] = loader
        real(iterator, loader, *args, **kwargs)

    def _fetch(self, real: Any, iterator: Any) -> Any:
        batch = real(iterator)
        loader = self._iterates.get(iterator)
        if loader is not None and world_size() > 1 and sum(self._steps.values()) < 4 * _STEPS:
            self._last, self._awaits = loader, True
            self._seen.setdefault(id(loader), []).append(_print(batch))
        return batch

    def _called(self, module: nn.Module, args: Any) -> None:
        if self._awaits and torch.is_grad_enabled() and (tensors := _tensors(args)):
            self._awaits = False
            self._fed.append(_print(tensors))

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
