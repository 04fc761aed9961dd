"""The order of the rows of an epoch: decided by the seed and the number of the epoch alone, for a resume as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler


class _ByEpoch(Sampler[int]):
    """A sampler's order, as the seed and the epoch's number decide it."""

    def __init__(self, sampler: Any, trainer: Any) -> None:
        self._sampler, self._trainer = sampler, trainer

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        epoch = int(self._trainer.state.epoch or 0)
        self._sampler.generator = torch.Generator().manual_seed(self._trainer.args.data_seed + epoch)
        return iter(self._sampler)


def draw_each_epoch_by_its_number(trainer: Any) -> None:
    """Orders of rows that the trainer draws from a chance that goes on from epoch to epoch.

    Of rows grouped by length that is the one that all else draws from as well; of TRL's prompts it begins anew with
    each start. A run that goes on would take other rows than the run that was not stopped. A plain shuffle is drawn by
    its epoch's number already.
    """
    sampler_of = trainer._get_train_sampler

    def by_number(*args: Any, **kwargs: Any) -> Any:
        sampler = sampler_of(*args, **kwargs)
        draws = hasattr(sampler, "generator") and not isinstance(sampler, RandomSampler)
        return _ByEpoch(sampler, trainer) if draws else sampler

    trainer._get_train_sampler = by_number
