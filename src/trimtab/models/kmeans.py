"""Codebooks by k-means, one after another on what the former left over; on any device, the same again from its seed.

Knows vectors alone, nothing of sound. Distances are computed on the vectors' device, in chunks; means on the CPU, in
fp64, in a fixed order, since sums by atomics differ from run to run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 8192
"""Vectors whose distances to all entries are held at once."""


def nearest(vectors: Tensor, entries: Tensor) -> Tensor:
    """The number of the entry that is nearest to each vector."""
    half = entries.square().sum(1) / 2
    return torch.cat([(half - chunk @ entries.T).argmin(1) for chunk in vectors.split(CHUNK)])


def residual_codebooks(
    vectors: Tensor,
    books: int,
    entries: int,
    rounds: int,
    generator: torch.Generator,
    told: Callable[[int], None] = lambda book: None,
) -> list[Tensor]:
    """`books` codebooks of at most `entries` vectors; the sum of one from each comes ever nearer to a vector.

    Entry 0 of each is zero: a vector of zeros is met exactly, and no later codebook makes a sum worse. Each has
    as many entries as differing vectors are left for it, where these are fewer.
    """
    left, found = vectors, []
    for book in range(books):
        learned = _means(left, entries - 1, rounds, generator)
        learned = torch.cat([learned.new_zeros(1, learned.shape[1]), learned])
        left = left - learned[nearest(left, learned)]
        found.append(learned)
        told(book)
    return found


def _means(vectors: Tensor, most: int, rounds: int, generator: torch.Generator) -> Tensor:
    """At most `most` means of the vectors by Lloyd's rule; those nearest to zero belong to zero, which stays."""
    count, width = vectors.shape
    drawn = torch.randperm(count, generator=generator)[:most].to(vectors.device)
    means = torch.unique(vectors[drawn], dim=0)
    on_cpu = vectors.double().cpu()
    for _ in range(rounds):
        entries = torch.cat([means.new_zeros(1, width), means])
        owner = nearest(vectors, entries)
        missed = (vectors - entries[owner]).square().sum(1)
        owner = owner.cpu()
        sums = torch.zeros(len(entries), width, dtype=torch.float64).index_add_(0, owner, on_cpu)
        sizes = torch.bincount(owner, minlength=len(entries))
        updated = (sums / sizes.clamp(min=1)[:, None]).to(means)[1:]
        empty = (sizes[1:] == 0).nonzero()[:, 0].to(vectors.device)
        if len(empty):
            # What owns nothing moves to the vectors that are met worst.
            worst = missed.topk(min(len(empty), count)).indices
            updated[empty[: len(worst)]] = vectors[worst]
        means = updated
    used = torch.bincount(
        nearest(vectors, torch.cat([means.new_zeros(1, width), means])).cpu(), minlength=len(means) + 1
    )
    return means[(used[1:] > 0).to(means.device)]
