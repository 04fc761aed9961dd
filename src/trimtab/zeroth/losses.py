"""The loss of each lane over all micro-batches and ranks, as one fp32 number that no placement changes.

The losses of single examples are brought together in the order of the micro-batches, whoever computed them, added up
in float64 one by one, and divided by their number. Ranks exchange these losses and nothing else, but for the word that
one of them failed: then all of them stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.zeroth.peers import exchange_device, gather, on_several_ranks, stop_all
from trimtab.zeroth.sweep import fp32

FAILED = -1
"""In the place of a micro-batch's size: the rank has no losses to give."""


def mean_losses(batches: Sequence[Any], losses_of: Callable[[Any], Tensor], lanes: int) -> tuple[float, ...]:
    """`losses_of` gives [lanes, examples] for a micro-batch; rank r of W computes those at r, r + W, …

    What `losses_of` raises on one rank ends the step on all of them.
    """
    if not batches:
        raise ValueError("a step needs at least one micro-batch")
    if on_several_ranks():
        parts = _spread(batches, losses_of, lanes)
    else:
        parts = [losses_of(batch).float().tolist() for batch in batches]
    totals, count = [0.0] * lanes, 0
    for part in parts:
        count += len(part[0])
        for lane, losses in enumerate(part):
            for loss in losses:
                totals[lane] += loss
    if count == 0:
        raise ValueError("the micro-batches of the step hold no example")
    return tuple(fp32(total / count) for total in totals)


def _spread(
    batches: Sequence[Any], losses_of: Callable[[Any], Tensor], lanes: int
) -> list[list[list[float]]]:
    """Each micro-batch's losses, whichever rank computed them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own: list[Tensor] = []
    failure: Exception | None = None
    try:
        own = [losses_of(batch).float().cpu() for batch in batches[rank::world]]
    except Exception as error:
        failure = error  # raised again in `_gather`, once the other ranks know
    tables = _gather(own, -(-len(batches) // world), lanes, failure)
    return [tables[i % world][i // world] for i in range(len(batches))]


def _gather(
    own: list[Tensor], slots: int, lanes: int, failure: Exception | None
) -> list[list[list[list[float]]]]:
    """Every rank's losses: [rank][micro-batch][lane][example]. Sizes first, since ranks know only their own."""
    device = exchange_device()
    with torch.inference_mode(False):
        sizes = [part.shape[1] for part in own] + [0] * (slots - len(own))
        if failure is not None:
            sizes = [FAILED] * slots
        counts = [every.tolist() for every in gather(torch.tensor(sizes, device=device))]
        if failed := [rank for rank, found in enumerate(counts) if FAILED in found]:
            stop_all(failed, failure, "computing the losses of its micro-batches")
        table = torch.zeros(slots, lanes, max(map(max, counts)), device=device)
        for i, part in enumerate(own):
            table[i, :, : part.shape[1]] = part
        tables = gather(table)
    return [[t[i, :, : counts[r][i]].tolist() for i in range(slots)] for r, t in enumerate(tables)]
