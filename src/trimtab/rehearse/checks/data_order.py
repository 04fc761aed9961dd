"""A DistributedSampler that shuffles but is never told the epoch gives the same order every time.

What counts is what was trained on: a pass that was broken off early (a look at one batch) is no epoch, and neither is
an evaluation, in which no optimizer steps. Of a program that trains nothing at all, whole passes count.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trimtab.diagnose import flow, mends_rows, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around

_NEARLY = 0.9
"""The part of a loader that makes a pass an epoch."""


@dataclass(eq=False)
class _Pass:
    """One iteration over a loader."""

    sampler: Any
    epoch: int
    batches: int
    where: Place | None
    given: int = 0
    steps: int = 0
    ended: bool = False
    graded: bool = True
    """Whether gradients were on when it began."""

    def is_epoch(self) -> bool:
        return self.steps > 0 and (self.ended or self.given >= _NEARLY * self.batches)


class DataOrder(BaseCheck):
    """Looks at which epoch each pass over a shuffling sampler is for."""

    def install(self) -> None:
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        """The epoch numbers under which each sampler has been trained on to its end."""
        self._whole: WeakKeyDictionary[Any, dict[int, list[_Pass]]] = WeakKeyDictionary()
        """All passes that came to their end, by their epoch number."""
        self._stepping = False
        self._current: _Pass | None = None
        around(_BaseDataLoaderIter, "__init__", self._begin)
        around(_BaseDataLoaderIter, "_reset", self._again)
        around(_BaseDataLoaderIter, "__next__", self._next)
        register_optimizer_step_post_hook(self._stepped)

    def _begin(self, real: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        self._start(iterator, loader)
        real(iterator, loader, *args, **kwargs)

    def _again(self, real: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """A loader with persistent workers keeps its iterator for every pass."""
        self._start(iterator, loader)
        real(iterator, loader, *args, **kwargs)

    def _start(self, iterator: Any, loader: Any) -> None:
        self.process.loaded_rows = True
        sampler = _sampler(loader)
        before = self._passes.pop(iterator, None)
        if before is not None:
            self._over(before)
        if sampler is not None and sampler.shuffle:
            self._passes[iterator] = _Pass(
                sampler, sampler.epoch, len(loader), places.here(), graded=torch.is_grad_enabled()
            )

    def _next(self, real: Any, iterator: Any) -> Any:
        mine = self._passes.get(iterator)
        if mine is None:
            return real(iterator)
        try:
            batch = real(iterator)
        except StopIteration:
            mine.ended = True
            self._over(mine)
            raise
        if self._current is not mine:
            if self._current is not None:
                self._over(self._current)
            self._current = mine
        mine.given += 1
        return batch

    def _over(self, done: _Pass) -> None:
        if done.is_epoch():
            self._epochs.setdefault(done.sampler, set()).add(done.epoch)
        if done.ended and done.graded:
            whole = self._whole.setdefault(done.sampler, {}).setdefault(done.epoch, [])
            if done not in whole:
                whole.append(done)

    def finish(self) -> None:
        """A program without an optimizer: the passes that were walked to their end under one number."""
        if not self._stepping:
            passes = [one for by_epoch in self._whole.values() for one in by_epoch.values()]
            for repeated in (one for one in passes if len(one) > 1):
                self._report(repeated[1])

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        mine, self._stepping = self._current, True
        if mine is None:
            return
        mine.steps += 1
        # A second batch, where there is one: one may be looked at again.
        enough = mine.given >= min(2, mine.batches)
        if enough and mine.epoch in self._epochs.get(mine.sampler, ()):
            self._report(mine)

    def _report(self, again: _Pass) -> None:
        where = again.where
        loader = _loop_over(where) if where is not None else None
        missing = flow.round_start(where) if where else None
        edit = mends_rows.set_epoch(where, loader) if where is not None and loader is not None else None
        call = edit.text.strip() if edit is not None else f"{loader or 'loader'}.sampler.set_epoch(epoch)"
        if "data-order" in self._said:
            return
        self._said.add("data-order")
        finding = Finding(
            kind="data-order",
            message=f"DistributedSampler was iterated again with the same epoch number ({again.epoch}): every epoch "
            "sees the same batches in the same order.",
            where=where,
            cause=cause_at(
                missing or where,
                "the shuffle is seeded by the epoch number, which set_epoch was never given",
            ),
            fix=f"Call {call} at the start of every epoch, before iterating over the loader.",
            op="DistributedSampler.__iter__",
            edits=[edit] if edit is not None else [],
        )
        self.process.report(finding)


def _sampler(loader: Any) -> Any:
    """The DistributedSampler from which a loader takes its rows, also through batch samplers that wrap another."""
    one: Any = loader
    for _ in range(4):
        one = getattr(one, "sampler", None) or getattr(one, "batch_sampler", None)
        if one is None or isinstance(one, DistributedSampler):
            return one
    return None


def _loop_over(where: Place) -> str | None:
    """What a line loops over, as written: `loader` in `for i, batch in enumerate(loader):`."""
    node = source.statement(where.file, where.line)
    if not isinstance(node, ast.For):
        return None
    over: ast.expr = node.iter
    while isinstance(over, ast.Call) and over.args and isinstance(over.func, ast.Name | ast.Attribute):
        over = over.args[0]
    return ast.unparse(over) if isinstance(over, ast.Name | ast.Attribute) else None
