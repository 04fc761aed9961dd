"""The loss of each lane over all micro-batches and ranks, as one fp32 number that no placement changes.

The losses of single examples are brought together in the order of the micro-batches, whoever computed them, added up
in float64 one by one, and divided by their number. Ranks exchange these losses and nothing else, but for the word that
one of them failed: then all of them stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from trimtab.zeroth.peers import own_rank, together
from trimtab.zeroth.sweep import fp32


def mean_losses(batches: Sequence[Any], losses_of: Callable[[Any], Tensor], lanes: int) -> tuple[float, ...]:
    """`losses_of` gives [lanes, examples] for a micro-batch; rank r of W computes those at r, r + W, …

    What `losses_of` raises on one rank ends the step on all of them.
    """
    if not batches:
        raise ValueError("a step needs at least one micro-batch")
    rank, world = own_rank()
    tables: list[list[list[list[float]]]] = []  # [rank][micro-batch][lane][example]
    with together("computing the losses of its micro-batches", tables):
        tables.append([losses_of(batch).float().tolist() for batch in batches[rank::world]])
    totals, count = [0.0] * lanes, 0
    for i in range(len(batches)):
        part = tables[i % world][i // world]
        count += len(part[0])
        for lane, losses in enumerate(part):
            for loss in losses:
                totals[lane] += loss
    if count == 0:
        raise ValueError("the micro-batches of the step hold no example")
    return tuple(fp32(total / count) for total in totals)
