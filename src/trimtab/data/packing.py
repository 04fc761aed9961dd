"""Which short rows share a sequence: best fit, the longest first. It cuts no row and knows nothing of models."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Bins of row numbers, each of at most `room` tokens. Rows without a token are left out."""
    bins: list[list[int]] = []
    spaces: list[int] = []
    """The spaces that are left in begun bins, each once, ascending."""
    begun: dict[int, deque[int]] = defaultdict(deque)
    for row in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: -lengths[r]):
        needed = lengths[row]
        if needed > room:
            raise ValueError(f"row {row} has {needed} tokens, and a sequence {room}")
        place = bisect_left(spaces, needed)
        if place < len(spaces):
            space = spaces[place]
            number = begun[space].popleft()
            if not begun[space]:
                spaces.pop(place)
        else:
            space, number = room, len(bins)
            bins.append([])
        bins[number].append(row)
        left = space - needed
        if left:
            if not begun[left]:
                insort(spaces, left)
            begun[left].append(number)
    return bins


def packed(rows: datasets.Dataset, room: int) -> datasets.Dataset:
    """The rows of `input_ids` and `labels` as sequences of several; `row_lengths` tells where one row ends."""
    import datasets

    ids, labels = rows["input_ids"][:], rows["labels"][:]
    bins = pack([len(row) for row in ids], room)
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[token for row in chosen for token in ids[row]] for chosen in bins],
            "labels": [[token for row in chosen for token in labels[row]] for chosen in bins],
            "row_lengths": [[len(ids[row]) for row in chosen] for chosen in bins],
        }
    )
