"""The loss of each lane over all micro-batches and ranks, as one fp32 number that no placement changes.

The losses of single examples are brought together in the order of the micro-batches, whoever computed them, added up
in float64 one by one, and divided by their number. Ranks exchange these losses and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.zeroth.sweep import fp32


def mean_losses(batches: Sequence[Any], losses_of: Callable[[Any], Tensor], lanes: int) -> tuple[float, ...]:
    """`losses_of` gives [lanes, examples] for a micro-batch; rank r of W computes those at r, r + W, …"""
    if not batches:
        raise ValueError("a step needs at least one micro-batch")
    spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
    own = [losses_of(batch).float() for batch in batches[rank::world]]
    if spread:
        tables = _gather([part.cpu() for part in own], -(-len(batches) // world), lanes)
        parts = [tables[i % world][i // world] for i in range(len(batches))]
    else:
        parts = [part.tolist() for part in own]
    totals, count = [0.0] * lanes, 0
    for part in parts:
        count += len(part[0])
        for lane, losses in enumerate(part):
            for loss in losses:
                totals[lane] += loss
    if count == 0:
        raise ValueError("the micro-batches of the step hold no example")
    return tuple(fp32(total / count) for total in totals)


def _gather(own: list[Tensor], slots: int, lanes: int) -> list[list[list[list[float]]]]:
    """Every rank's losses: [rank][micro-batch][lane][example]. Sizes first, since ranks know only their own."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    world = dist.get_world_size()
    with torch.inference_mode(False):
        sizes = torch.tensor([p.shape[1] for p in own] + [0] * (slots - len(own)), device=device)
        every = [torch.empty_like(sizes) for _ in range(world)]
        dist.all_gather(every, sizes)
        counts = [e.tolist() for e in every]
        most = max(max(c) for c in counts)
        table = torch.zeros(slots, lanes, most, device=device)
        for i, part in enumerate(own):
            table[i, :, : part.shape[1]] = part
        tables = [torch.empty_like(table) for _ in range(world)]
        dist.all_gather(tables, table)
    return [[t[i, :, : counts[r][i]].tolist() for i in range(slots)] for r, t in enumerate(tables)]
