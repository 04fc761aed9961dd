"""The rows that a rehearsal of shapes meets: those that take most memory, early, and no more of them than that needs.

It evaluates on one batch for each process; more would make no loss any truer, as none is computed. A zeroth-order run
meets its own heaviest steps behind its first one (row_order.py does the same for transformers' trainers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.zeroth.batches import BatchStream, by_length
from trimtab.zeroth.objective import Example


def evaluated(rows: Any, a_process: int, processes: int) -> Any:
    """The longest of the held-out rows, as many as one batch takes; all where nothing tells how long they are."""
    count = a_process * processes
    if rows is None or len(rows) <= count:
        return rows
    if not isinstance(rows[0], Mapping) or "input_ids" not in rows[0]:
        return rows
    lengths = [len(row["input_ids"]) for row in rows]
    longest = sorted(range(len(lengths)), key=lambda place: -lengths[place])[:count]
    return rows.select(longest) if hasattr(rows, "select") else [rows[place] for place in longest]


def heaviest(examples: Sequence[Example], batch_size: int, processes: int) -> list[int]:
    """Places of the scored examples of one batch for each process: that with the most tokens, and where it is another
    one, that with the most logits. They are batches of the whole evaluation, and make up the same ones again."""
    batches = by_length(examples, batch_size)
    kept: set[int] = set()
    for size in (_tokens, _logits):
        weights = [size([examples[place] for place in batch]) for batch in batches]
        kept.update(sorted(range(len(batches)), key=lambda number: -weights[number])[:processes])
    return [place for number in sorted(kept) for place in batches[number]]


class HeaviestEarly(BatchStream):
    """A run's steps, with those early that hold most: by the tokens of a micro-batch, and by its logits.

    The first step stays the first where more are made than these, as what a smaller batch has taken before may be of no
    use to a larger one. Within its step the largest micro-batch comes first: rank 0, which takes it, may stand for all.
    """

    def __init__(self, steps: BatchStream, *, whole: int, made: int) -> None:
        """`whole`: how many steps the run has, `made`: how many of them the rehearsal makes."""
        super().__init__(steps.examples, steps.batch_size, steps.micro_batches, steps.seed, steps.collate)
        heavy = self._heaviest(whole)
        self._early = ([(0, 0)] if made > len(heavy) else []) + heavy

    def drawn(self, step: int) -> list[list[Example]]:
        step, first = self._early[step] if step < len(self._early) else (step, 0)
        found = super().drawn(step)
        return found[first:] + found[:first]

    def _heaviest(self, whole: int) -> list[tuple[int, int]]:
        """Steps by number, each with the place of the micro-batch that is the largest of all."""
        most: list[tuple[int, tuple[int, int]]] = [(0, (0, 0))] * 2
        for step in range(whole):
            for place, batch in enumerate(super().drawn(step)):
                for way, size in enumerate((_tokens, _logits)):
                    if (found := size(batch)) > most[way][0]:
                        most[way] = found, (step, place)
        return list(dict.fromkeys(where for _, where in most))


def _rows(batch: Sequence[Example]) -> int:
    return sum(example.rows for example in batch)


def _tokens(batch: Sequence[Example]) -> int:
    return _rows(batch) * max(example.length for example in batch)


def _logits(batch: Sequence[Example]) -> int:
    return _rows(batch) * max(len(answer) for example in batch for answer in example.candidates)
