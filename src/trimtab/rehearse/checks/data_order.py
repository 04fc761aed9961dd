"""A DistributedSampler that shuffles but is never told the epoch gives the same order every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DistributedSampler

from trimtab.diagnose.finding import Finding
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around


class DataOrder(BaseCheck):
    """Looks at which epoch each pass over a shuffling sampler is for."""

    def install(self) -> None:
        self._last: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        around(DistributedSampler, "__iter__", self._wrap)

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(sampler: Any) -> Any:
            # An evaluation may see its rows in the same order every time.
            if not torch.is_grad_enabled():
                return real(sampler)
            if sampler.shuffle and self._last.get(sampler) == sampler.epoch:
                self._report(sampler)
            self._last[sampler] = sampler.epoch
            return real(sampler)

        return iterate

    def _report(self, sampler: Any) -> None:
        where = places.here()
        missing = places.loop_around(where) if where else None
        self.process.report(
            Finding(
                kind="data-order",
                message="DistributedSampler was iterated again with the same epoch number "
                f"({sampler.epoch}): every epoch sees the same batches in the same order.",
                where=where,
                cause=places.cause_at(
                    missing or where,
                    "the shuffle is seeded by the epoch number, which set_epoch was never given",
                ),
                fix="Call sampler.set_epoch(epoch) at the start of every epoch, before iterating over the loader.",
                op="DistributedSampler.__iter__",
            )
        )
