"""A DistributedSampler that shuffles but is never told the epoch gives the same order every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DistributedSampler

from trimtab.diagnose import flow
from trimtab.diagnose.finding import cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around


class DataOrder(BaseCheck):
    """Looks at which epoch each pass over a shuffling sampler is for."""

    def install(self) -> None:
        self._last: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        around(DistributedSampler, "__iter__", self._iterate)

    def _iterate(self, real: Callable[..., Any], sampler: Any) -> Any:
        # An evaluation may see its rows in the same order every time.
        if torch.is_grad_enabled():
            if sampler.shuffle and self._last.get(sampler) == sampler.epoch:
                self._report(sampler.epoch)
            self._last[sampler] = sampler.epoch
        return real(sampler)

    def _report(self, epoch: int) -> None:
        where = places.here()
        missing = flow.round_start(where) if where else None
        why = "the shuffle is seeded by the epoch number, which set_epoch was never given"
        self.report(
            "data-order",
            f"DistributedSampler was iterated again with the same epoch number ({epoch}): every epoch sees the same "
            "batches in the same order.",
            where,
            cause_at(missing or where, why),
            fix="Call sampler.set_epoch(epoch) at the start of every epoch, before iterating over the loader.",
            op="DistributedSampler.__iter__",
        )
