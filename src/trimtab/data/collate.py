"""Rows of tokens as one batch: laid end to end without a token of padding, or padded where a model needs that.

A batch says what its readers would else have to ask a device for: how many tokens it holds (`tokens`) and trains on
(`items`), how long its rows are (`lengths`), and at which places the head has something to tell (`head_rows`, counted
over the batch laid flat, with the token that comes next there as `head_labels`). It stays on the CPU, and knows no
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F

from trimtab.data.render import IGNORED
from trimtab.data.shared_start import Row, branched, shared_start, without_tails

Layout = Literal["rows", "positions", "padded"]
"""`rows`: end to end, with the bounds that an attention kernel takes; `positions`: end to end, told apart by positions
that begin again, from which the model makes its mask; `padded`: side by side."""
Batch = dict[str, Any]


class Collate:
    """A batch of examples with `input_ids` and `labels`, and `row_lengths` where an example holds several rows."""

    def __init__(self, layout: Layout, pad: int, *, shares: bool = False) -> None:
        """`shares`: what all rows of a batch begin with stands there once, and what comes behind a row's last trained
        token is not computed; only for the layout `rows`."""
        self.layout, self._pad, self._shares = layout, pad, shares

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        lengths = [n for e in examples for n in e.get("row_lengths") or [len(e["input_ids"])]]
        if self.layout == "padded" and len(lengths) > len(examples):
            raise ValueError("packed rows cannot be padded: they would see each other")
        rows = _rows(examples, lengths) if self._shares and self.layout == "rows" else []
        if shared := shared_start(rows):
            batch = branched(rows, shared)
        elif self.layout != "padded" and len(set(lengths)) > 1:
            batch = _end_to_end(examples, lengths, bounds=self.layout == "rows")
        elif len(set(lengths)) > 1:
            batch = self._padded(examples, lengths)
        else:
            batch = _side_by_side(examples, lengths)
        batch |= _at_the_head(batch["labels"]) | {"tokens": sum(lengths), "lengths": tuple(lengths)}
        return batch | without_tails(batch) if rows else batch

    def _padded(self, examples: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Batch:
        longest = max(lengths)

        def side_by_side(name: str, fill: int) -> torch.Tensor:
            return torch.stack(
                [F.pad(torch.tensor(e[name]), (0, longest - len(e[name])), value=fill) for e in examples]
            )

        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        return {
            "input_ids": side_by_side("input_ids", self._pad),
            "labels": side_by_side("labels", IGNORED),
            "attention_mask": mask.long(),
        }


def _rows(examples: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> list[Row]:
    ids, labels = ([t for e in examples for t in e[name]] for name in ("input_ids", "labels"))
    seams = [0, *accumulate(lengths)]
    return [(ids[a:b], labels[a:b]) for a, b in pairwise(seams)]


def _side_by_side(examples: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Batch:
    """Rows of one length need neither padding nor bounds, and no mask."""
    shape = (len(lengths), lengths[0])
    return {name: _flat(examples, name).view(shape) for name in ("input_ids", "labels")}


def _end_to_end(examples: Sequence[Mapping[str, Any]], lengths: Sequence[int], *, bounds: bool) -> Batch:
    each = torch.tensor(lengths)
    ends = each.cumsum(0)
    starts = ends - each
    labels = _flat(examples, "labels")
    # No row tells the first token of the next.
    labels[starts] = IGNORED
    batch: Batch = {
        # First, so that whoever counts a batch's rows by its first tensor counts these.
        "row_lengths": each,
        "input_ids": _flat(examples, "input_ids")[None],
        "labels": labels[None],
        "position_ids": (torch.arange(len(labels)) - starts.repeat_interleave(each))[None],
    }
    if bounds:
        seams = F.pad(ends, (1, 0)).to(torch.int32)
        # A power of two: what is compiled for one longest row serves all up to it.
        longest = 1 << (max(lengths) - 1).bit_length()
        batch |= {"cu_seq_lens_q": seams, "cu_seq_lens_k": seams}
        batch |= {"max_length_q": longest, "max_length_k": longest}
    return batch


def _flat(examples: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    return torch.tensor([token for example in examples for token in example[name]])


def _at_the_head(labels: torch.Tensor) -> Batch:
    ahead = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    rows = (ahead != IGNORED).nonzero().flatten()
    items = len(rows)
    if not items:
        # One place without a label: its loss is zero, and still hangs on the graph.
        rows = torch.zeros(1, dtype=torch.long)
    return {"head_rows": rows, "head_labels": ahead[rows], "items": items}
