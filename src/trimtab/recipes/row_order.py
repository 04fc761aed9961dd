"""The order of a run's rows, as it follows from the seed and the epoch alone.

Samplers of transformers and TRL draw each epoch's order from wherever the random numbers stand: a run that goes on
inside a later epoch draws another one, and processes that have drawn differently before (dropout) take each other's
rows. What they draw by is left as it is; only where they begin to draw is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler


class ByEpoch(Sampler[int]):
    """A sampler that draws from a generator of its own, set anew for each epoch, of which the data loader tells it."""

    def __init__(self, drawing: Any, seed: int) -> None:
        """`drawing` has a `generator`, which may be None so far."""
        if drawing.generator is None:
            drawing.generator = torch.Generator()
        self._drawing, self._seed, self._epoch = drawing, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._drawing.generator.manual_seed(self._seed + self._epoch)
        return iter(self._drawing)

    def __len__(self) -> int:
        return len(self._drawing)


def order_by_epoch(trainer: Any) -> None:
    """Wrap the trainer's sampler, unless it is told of epochs by itself; of RandomSampler Accelerate takes care."""
    its_own = trainer._get_train_sampler

    def sampler(*args: Any, **kwargs: Any) -> Any:
        found = its_own(*args, **kwargs)
        told = isinstance(found, RandomSampler) or hasattr(found, "set_epoch")
        return found if told or not hasattr(found, "generator") else ByEpoch(found, trainer.args.seed)

    trainer._get_train_sampler = sampler


LONGEST_FIRST = "the longest rows of the data come first, together in one batch"
"""What a rehearsal of shapes says of its rows where the run's own batches are not known,"""
HEAVIEST_FIRST = "the run's own batch with the most tokens, of all its epochs, comes early"
"""and where they are."""


FEW = 4
"""So many steps of a run are rehearsed as they are, in their own order."""


class InOrder(Sampler[int]):
    """Rows in an order that was decided before."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def heaviest_first(trainer: Any, length: Callable[[Any], int], *, padded: bool, steps: int | None) -> bool:
    """Where memory is rehearsed by shapes: the batch of the whole run that takes most is the second step's.

    Tells whether the order was changed: a run of a few steps that are all made meets its batches by itself.

    The second's, because the optimizer's state is there only after a step, and because what a smaller batch has taken
    before may be of no use to it. Where `steps`, all that are made, is one, it is the first's. Called after
    `order_by_epoch`.
    """
    batches = _batches_of_run(trainer)
    lengths = [length(row) for row in trainer.train_dataset]
    a_step = trainer.args.gradient_accumulation_steps * trainer.args.world_size
    made = math.ceil(len(batches) / a_step)
    if made <= min(FEW, steps or FEW):
        return False
    first = [] if steps == 1 else batches[:a_step]
    heavy = [_heaviest(batches, lengths, padded)] * a_step
    laid = [place for batch in (*first, *heavy, *batches[len(first) :]) for place in batch]
    order = InOrder(laid[: len(lengths)])
    trainer._get_train_sampler = lambda *_, **__: order
    return True


def _heaviest(batches: Sequence[list[int]], lengths: Sequence[int], padded: bool) -> list[int]:
    """Of whole batches, where there are any: a shorter one would be filled up by the next."""
    most = max(map(len, batches))

    def weight(batch: list[int]) -> int:
        taken = [lengths[place] for place in batch]
        return max(taken) * len(taken) if padded else sum(taken)

    return max((batch for batch in batches if len(batch) == most), key=weight)


def _batches_of_run(trainer: Any) -> list[list[int]]:
    """The rows of every batch of all processes and epochs, as the trainer's own data loader will draw them."""
    args, prepared = trainer.args, trainer.accelerator._dataloaders
    known = len(prepared)
    loader = trainer.get_train_dataloader()
    del prepared[known:]  # it is not the run's
    drawing = loader.batch_sampler
    drawing = getattr(drawing, "batch_sampler", drawing)  # of all processes, where each takes a share
    last = args.max_steps * args.gradient_accumulation_steps * args.world_size
    batches: list[list[int]] = []
    for epoch in range(math.ceil(args.num_train_epochs) if last <= 0 else last):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches += [list(batch) for batch in drawing]
        if 0 < last <= len(batches):
            return batches[:last]
    return batches
