"""The rows that a rehearsal of shapes evaluates on: one batch for each process, of the longest.

More of them would make no loss any truer, as none is computed, and no other batch takes more memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from trimtab.zeroth.batches import by_length

    batches = by_length(examples, batch_size)

    def rows(batch: list[int]) -> int:
        return sum(examples[place].rows for place in batch)

    def tokens(batch: list[int]) -> int:
        return rows(batch) * max(examples[place].length for place in batch)

    def logits(batch: list[int]) -> int:
        return rows(batch) * max(len(answer) for place in batch for answer in examples[place].candidates)

    kept: set[int] = set()
    for size in (tokens, logits):
        numbers = sorted(range(len(batches)), key=lambda number: -size(batches[number]))
        kept.update(numbers[:processes])
    return [place for number in sorted(kept) for place in batches[number]]
