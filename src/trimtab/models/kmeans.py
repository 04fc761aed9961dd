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
    each: int,
    rounds: int,
    generator: torch.Generator,
    told: Callable[[int], None] = lambda book: None,
) -> list[Tensor]:
    """`books` codebooks of at most `entries` vectors; the sum of one from each comes ever nearer to a vector.

    Entry 0 of each is zero: a vector of zeros is met exactly, and no later codebook makes a sum worse. There is at most
    one entry for `each` so many vectors, since one for every vector would leave nothing over to learn the next from.
    """
    left, found = vectors, []
    for book in range(books):
        # What is met already has nothing to say about the other entries.
        unmet = left[left.any(1)]
        learned = _means(unmet, min(entries - 1, -(-len(unmet) // each)), rounds, generator)
        found.append(torch.cat([vectors.new_zeros(1, vectors.shape[1]), learned]))
        left = left - found[-1][nearest(left, found[-1])]
        told(book)
    return found


def _means(vectors: Tensor, most: int, rounds: int, generator: torch.Generator) -> Tensor:
    """At most `most` means of the vectors by Lloyd's rule; those nearest to zero belong to zero, which stays."""
    drawn = torch.randperm(len(vectors), generator=generator)[:most].to(vectors.device)
    means, exact = vectors[drawn], vectors.double().cpu()
    for _ in range(rounds):
        entries = torch.cat([means.new_zeros(1, means.shape[1]), means])
        owner = nearest(vectors, entries)
        missed = (vectors - entries[owner]).square().sum(1)
        owner = owner.cpu()
        sums = torch.zeros(entries.shape, dtype=torch.float64, device="cpu").index_add_(0, owner, exact)
        sizes = torch.bincount(owner, minlength=len(entries))
        means = (sums / sizes.clamp(min=1)[:, None]).to(means)[1:]
        # What owns nothing moves to the vectors that are met worst; in the end it is left out.
        empty = (sizes[1:] == 0).to(means.device)
        worst = missed.topk(int(empty.sum())).indices
        moved = means.masked_scatter(empty[:, None], vectors[worst])
        means, last = moved, means[~empty]
    return last
