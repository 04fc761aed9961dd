"""Which examples make up which batch: a function of the seed and a count, so that a run can go on anywhere.

Needs torch alone, and stays on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.zeroth.objective import Example, ScoreBatch, build_batch


@dataclass(frozen=True)
class Collate:
    """How examples become the rows of a batch."""

    pad_id: int
    max_length: int
    bos_id: int | None = None
    pad_to_multiple: int = 1

    def __call__(self, examples: Sequence[Example]) -> ScoreBatch:
        return build_batch(examples, self.pad_id, self.max_length, self.pad_to_multiple, self.bos_id)


class BatchStream:
    """Endless steps over shuffled examples. Each is a list of micro-batches; `taken` steps were drawn so far.

    The order of each pass over the examples depends on the seed and the number of the pass alone.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        micro_batches: int,
        seed: int,
        collate: Collate,
    ) -> None:
        self.examples, self.batch_size, self.micro_batches = examples, batch_size, micro_batches
        self.seed, self.collate = seed, collate
        self.taken = 0
        self._orders: dict[int, list[int]] = {}

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.examples) / (self.batch_size * self.micro_batches))

    def __call__(self) -> list[ScoreBatch]:
        """The next step's micro-batches."""
        self.taken += 1
        return list(map(self.collate, self.drawn(self.taken - 1)))

    def drawn(self, step: int) -> list[list[Example]]:
        """The micro-batches of a step. What one pass has left over begins the next one's first batch."""
        count = self.batch_size * self.micro_batches
        drawn = [self._at(place) for place in range(step * count, (step + 1) * count)]
        return [drawn[first : first + self.batch_size] for first in range(0, count, self.batch_size)]

    def _at(self, place: int) -> Example:
        turn, index = divmod(place, len(self.examples))
        if turn not in self._orders:
            # Only neighbouring passes are ever needed at once.
            self._orders = {t: order for t, order in self._orders.items() if t >= turn - 1}
            self._orders[turn] = self._order(turn)
        return self.examples[self._orders[turn][index]]

    def _order(self, turn: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + turn) % 2**63)
        order: list[int] = torch.randperm(len(self.examples), generator=generator).tolist()
        return order


def by_length(examples: Sequence[Example], batch_size: int, *, by_rows: bool = False) -> list[list[int]]:
    """Places of examples in batches of similar length, the longest first: what does not fit fails at once.

    A batch has `batch_size` examples, or with `by_rows` as many as fill so many rows (one example at least).
    """
    groups: list[list[int]] = []
    room = 0
    for place in sorted(range(len(examples)), key=lambda i: -examples[i].length):
        needed = examples[place].rows if by_rows else 1
        if needed > room:
            groups.append([])
            room = batch_size
        groups[-1].append(place)
        room -= needed
    return groups
