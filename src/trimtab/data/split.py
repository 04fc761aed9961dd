"""Holds rows out for evaluation, by seed. Never touches tokens, and never uses a random generator.

Rows are ordered by a hash of the seed and their content, so the split is the same on every platform and Python
version, does not depend on the order of the file, and keeps identical rows on one side.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from trimtab.errors import RequestError

Kept = TypeVar("Kept")


def hold_out(
    rows: Sequence[Kept], key: Callable[[Kept], str], fraction: float, seed: int
) -> tuple[list[Kept], list[Kept], str]:
    """Rows to train on, rows held out, and how they were told apart."""
    keys = [key(row) for row in rows]
    chosen = held_out(keys, fraction, seed)
    train = [row for row, mark in zip(rows, keys, strict=True) if mark not in chosen]
    held = [row for row, mark in zip(rows, keys, strict=True) if mark in chosen]
    return train, held, f"data.eval_fraction={fraction}, seed {seed}"


def held_out(keys: Sequence[str], fraction: float, seed: int, last: Collection[str] = ()) -> set[str]:
    """The keys to hold out: as near to `fraction` of the rows as whole rows allow, at least one, never all.

    `keys` has one entry per row; equal keys are identical rows. Those in `last` are taken when the others do not do.
    """
    count = Counter(keys)
    unique = sorted(count, key=lambda key: (key in last, hashlib.sha256(f"{seed}:{key}".encode()).digest()))
    if len(unique) < 2:
        raise RequestError.of(
            f"data.eval_fraction={fraction}: only {len(unique)} different row to split",
            "one part is trained on and another held out, and both need a row",
            "set data.eval_fraction=0, name a data.eval_source, or give more rows",
        )
    wanted = max(1, int(len(keys) * fraction + 0.5))
    chosen: set[str] = set()
    for key in unique[:-1]:
        if wanted > 0:
            chosen.add(key)
            wanted -= count[key]
    return chosen
