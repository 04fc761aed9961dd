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


HEAVIEST_FIRST = "the run's own step with the batch that has the most tokens, of all its epochs, comes early"
"""What a rehearsal of shapes says of its rows."""


Batch = list[int]
"""Places of its rows."""
Step = list[Batch]
FEW = 4
"""So many steps of a run are rehearsed by shapes, the heaviest among them; a shorter run as it is, in its own order."""
FEW_SHARDED = 2
"""Of sharded weights, whose steps take longest: the first, and the heaviest beside the optimizer's state."""
FEW_STEPS = (
    "by shapes {made} of the run's steps are made: none after them takes more (--max-steps makes more)"
)
AT_THE_END = (
    "by shapes sharded weights are evaluated and saved once, at the end: the same is gathered each time"
)


class InOrder(Sampler[int]):
    """Rows in an order that was decided before."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def heaviest_first(trainer: Any, length: Callable[[Any], int], *, padded: bool, steps: int | None) -> bool:
    """Where memory is rehearsed by shapes: the step of the whole run that takes most comes second.

    Tells whether the order was changed: a run of a few steps that are all made meets its batches by itself.

    The second, because the optimizer's state is there only after a step, and because what a smaller batch has taken
    before may be of no use to it. Where `steps`, all that are made, is one, it is the first. Called after
    `order_by_epoch`.
    """
    run = _steps_of_run(trainer)
    lengths = [length(row) for row in trainer.train_dataset]
    if len(run) <= min(FEW, steps or FEW):
        return False

    def weight(batch: Batch) -> int:
        taken = [lengths[place] for place in batch]
        return max(taken) * len(taken) if padded else sum(taken)

    first = run[0] if steps != 1 else []
    heavy = _heavy_steps(run, weight, trainer.args.world_size)
    if len(heavy) > 1 and (steps in (1, 2) or _rows([first, *heavy]) > len(lengths)):
        # Only one of them would be met: in its place the most that can be.
        heavy = [[max(_whole(run), key=weight)] * len(run[0])]
    if _rows([first, *heavy]) > len(lengths):
        first = []  # an epoch is no longer; the next one brings it again
    laid = [*first, *(batch for step in heavy for batch in step)]
    laid += [batch for step in run for batch in step][len(first) :]
    order = InOrder([place for batch in laid for place in batch][: len(lengths)])
    trainer._get_train_sampler = lambda *_, **__: order
    return True


def is_longer(trainer: Any, steps: int) -> bool:
    """Whether a run surely makes more than so many steps."""
    args = trainer.args
    if args.max_steps > 0:
        return bool(args.max_steps > steps)
    rows = len(trainer.train_dataset) * getattr(args, "num_generations", 1)
    a_step = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return bool(int(args.num_train_epochs * (rows // a_step)) > steps)


def end_after(trainer: Any, steps: int) -> None:
    """Have a run make so many steps, with its evaluation and its checkpoint at their end."""
    args = trainer.args
    args.max_steps = steps
    for name in ("eval_steps", "save_steps"):
        if getattr(args, name):
            setattr(args, name, min(getattr(args, name), steps))


def look_at_the_end(trainer: Any) -> bool:
    """Have a run of a known number of steps evaluate and save once, at its end; whether it may have more often."""
    args = trainer.args
    if args.max_steps <= 1:
        return False
    often = False
    for what in ("eval", "save"):
        strategy, steps = getattr(args, f"{what}_strategy"), getattr(args, f"{what}_steps")
        if strategy == "epoch" or (strategy == "steps" and steps < args.max_steps):
            setattr(args, f"{what}_strategy", type(strategy)("steps"))
            setattr(args, f"{what}_steps", args.max_steps)
            often = True
    return often


def _heavy_steps(run: Sequence[Step], weight: Callable[[Batch], int], ranks: int) -> list[Step]:
    """The step with the heaviest batch; and where that comes first in it, also the one with the heaviest of those that
    come later, when gradients of an earlier pass are there. Their passes as one rank makes them, for all ranks."""
    most = max(_whole(run), key=weight)
    found: dict[tuple[int, int], Step] = {}
    for earliest in (0, 1):
        places = [
            (weight(batch), at >= ranks, number, at % ranks)
            for number, step in enumerate(run)
            for at, batch in enumerate(step)
            if at >= earliest * ranks and len(batch) == len(most)
        ]
        # Of equals one that comes later in its step.
        if places:
            _, later, number, rank = max(places, key=lambda place: place[:2])
            found[number, rank] = [
                batch if len(batch) == len(most) else most
                for batch in run[number][rank::ranks]
                for _ in range(ranks)
            ]
            if later:
                break
    return list(found.values())


def _whole(run: Sequence[Step]) -> list[Batch]:
    """Whole batches: a shorter one would be filled up by the next."""
    most = max(len(batch) for step in run for batch in step)
    return [batch for step in run for batch in step if len(batch) == most]


def _rows(run: Sequence[Step]) -> int:
    return sum(len(batch) for step in run for batch in step)


def _steps_of_run(trainer: Any) -> list[Step]:
    """The batches of all processes, by step, as the trainer's own data loader will draw them. An epoch's last step may
    have fewer."""
    args, prepared = trainer.args, trainer.accelerator._dataloaders
    known = len(prepared)
    loader = trainer.get_train_dataloader()
    del prepared[known:]  # it is not the run's
    drawing = loader.batch_sampler
    drawing = getattr(drawing, "batch_sampler", drawing)  # of all processes, where each takes a share
    a_step = args.gradient_accumulation_steps * args.world_size
    steps: list[Step] = []
    for epoch in range(math.ceil(args.num_train_epochs) if args.max_steps <= 0 else args.max_steps):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = [list(batch) for batch in drawing]
        steps += [batches[at : at + a_step] for at in range(0, len(batches), a_step)]
        if 0 < args.max_steps <= len(steps):
            return steps[: args.max_steps]
    return steps
