"""The order of a run's rows, as it follows from the seed and the epoch alone.

Samplers of transformers and TRL draw each epoch's order from wherever the random numbers stand: a run that goes on
inside a later epoch draws another one, and processes that have drawn differently before (dropout) take each other's
rows. What they draw by is left as it is; only where they begin to draw is set.
"""

from __future__ import annotations

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
"""What a rehearsal of shapes says of its rows."""


class Longest(Sampler[int]):
    """The rows by their length, the longest first."""

    def __init__(self, rows: Sequence[Any], length: Callable[[Any], int]) -> None:
        lengths = [length(row) for row in rows]
        self._order = sorted(range(len(lengths)), key=lambda place: -lengths[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def longest_first(trainer: Any, length: Callable[[Any], int]) -> None:
    """Where memory is rehearsed by shapes: a step with the longest rows is among the first, whatever the seed."""
    order = Longest(trainer.train_dataset, length)
    trainer._get_train_sampler = lambda *_, **__: order
