"""Rows of which no token is computed twice, nor one that no loss hears of.

A chat template begins each row with the same words (a system prompt above all), and a causal model makes the same of
them in every row: computed once, they give the same losses and gradients. What stands behind the last token that is
told (the token itself, and what ends a turn after it) tells nothing, and is seen by nothing that does. It only lays
tokens; the attention that lets each row see what it shares is `fast/attention.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.data.render import IGNORED

LEAST = 8
"""Tokens: fewer are not worth the trouble."""
Row = tuple[list[int], list[int]]
"""Its tokens and its labels."""


def shared_start(rows: Sequence[Row]) -> int:
    """How many tokens all rows begin with, none of them trained on; 0 where that is not worth it."""
    if len(rows) < 2:
        return 0
    # All begin alike as far as the first and the last in their order do.
    low, high = min(ids for ids, _ in rows), max(ids for ids, _ in rows)
    same = (at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    common = next(same, min(len(low), len(high)))
    # The last shared token tells no row's next one: that, and what comes before it, has no label.
    for _, labels in rows:
        first = next((at for at, label in enumerate(labels) if at and label != IGNORED), len(labels))
        common = min(common, first - 1)
    return common if common >= LEAST else 0


def branched(rows: Sequence[Row], shared: int) -> dict[str, Any]:
    """What all share, then the rest of each row: one sequence, with positions as each row alone has them."""
    own = torch.tensor([len(ids) - shared for ids, _ in rows])
    parts = F.pad(own, (1, 0), value=shared)
    labels = torch.tensor([IGNORED] * shared + [label for _, row in rows for label in row[shared:]])
    ends = parts.cumsum(0)
    starts = ends - parts
    places = torch.arange(len(labels)) - starts.repeat_interleave(parts)
    places[shared:] += shared
    # No row tells the first token of the next one's rest.
    labels[starts[1:]] = IGNORED
    seams = F.pad(ends, (1, 0)).to(torch.int32)
    longest = 1 << (int(parts.max()) - 1).bit_length()
    return {
        # First, so that whoever counts a batch's rows by its first tensor counts these.
        "row_lengths": own + shared,
        "input_ids": torch.tensor([*rows[0][0][:shared], *(t for ids, _ in rows for t in ids[shared:])])[
            None
        ],
        "labels": labels[None],
        "position_ids": places[None],
        "cu_seq_lens_q": seams,
        "cu_seq_lens_k": seams,
        "max_length_q": longest,
        "max_length_k": longest,
        "shared_start": shared,
    }


def without_tails(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What changes in a batch whose rows are computed up to the last place that tells something: `computed` names the
    places that are, of which bounds and `head_rows` are then counted. The batch itself stays whole for its readers."""
    count = batch["input_ids"].shape[1]
    if batch["input_ids"].shape[0] != 1:
        return {}
    seams = batch["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in batch else [0, count]
    tells = torch.zeros(count, dtype=torch.bool)
    tells[batch["head_rows"]] = True
    needed = torch.ones(count, dtype=torch.bool)
    for start, end in pairwise(seams):
        told = tells[start:end].nonzero().flatten()
        # A row that tells nothing, as what all share does not, stays as it is.
        if len(told):
            needed[start + int(told[-1]) + 1 : end] = False
    if needed.all():
        return {}
    place = needed.cumsum(0)
    made = {"computed": needed.nonzero().flatten(), "head_rows": place[batch["head_rows"]] - 1}
    if "cu_seq_lens_q" in batch:
        bounds = F.pad(place, (1, 0))[seams].to(torch.int32)
        made |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return made
