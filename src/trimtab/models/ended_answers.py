"""Answers of one length: end tokens are put behind each, to be learned, so that masked diffusion can end an answer.

It works on batches as a collator makes them, on the CPU or where they are. It masks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.data.render import IGNORED
from trimtab.models.two_way import Batch, token_inputs, with_columns


@dataclass(frozen=True)
class EndedAnswers:
    """A collator whose answers are filled with end tokens, which are learned: so the sampler can end an answer.

    What the template writes behind the last answer is cut off: seen from both sides, it would tell the answer's
    length. Longer answers stay as they are, and so do those that `data.max_length` cut: they do not end there. Its
    labels are the tokens that are trained, so counting them counts right.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]
    end_id: int
    answer_length: int | None
    """Tokens of each last answer; None: those of the batch's longest."""
    ends: tuple[int, ...] = ()
    """One of these is in an answer that was not cut; where the template writes none, all count as whole."""

    def __call__(self, rows: list[Any]) -> Batch:
        return with_ends(self.collate(rows), self.end_id, self.answer_length, self.ends)


def with_ends(
    batch: Mapping[str, Any], end_id: int, answer_length: int | None, ends: tuple[int, ...] = ()
) -> Batch:
    """The same right-padded batch, every last answer filled to `answer_length`. Doing it twice changes nothing."""
    import torch

    labels, real = batch["labels"].cpu(), batch["attention_mask"].bool().cpu()
    if (real.long().diff(dim=1) > 0).any():
        raise ValueError("masked diffusion takes rows that are padded on the right")
    olds, runs = [], []
    for row, own in zip(labels.tolist(), real, strict=True):
        places = [place for place, token in enumerate(row) if token != IGNORED]
        olds.append(places[-1] + 1 if places else int(own.sum()))
        runs.append(_run(row, olds[-1]))
    wanted = max(map(len, runs)) if answer_length is None else answer_length
    whole = [bool(run) and (not ends or not {*ends, end_id}.isdisjoint(run)) for run in runs]
    stops = [
        old + max(wanted - len(run), 0) * ended for old, run, ended in zip(olds, runs, whole, strict=True)
    ]
    wide = with_columns(batch, max(stops) - labels.shape[1], end_id)
    tokens = token_inputs(wide)
    made: Batch = {**wide, **{name: wide[name][:, : max(stops)].clone() for name in tokens}}
    column = torch.arange(max(stops), device=made["input_ids"].device)
    old, new = (torch.tensor(of, device=column.device)[:, None] for of in (olds, stops))
    after, added = column >= old, (column >= old) & (column < new)
    for name in tokens:
        # Marks of a kind of token go on as they are on the row's last one.
        last = made[name].gather(1, old - 1)
        made[name] = torch.where(after, last, made[name])
    made["input_ids"] = made["input_ids"].masked_fill(after, end_id)
    made["labels"] = made["labels"].masked_fill(after, IGNORED).masked_fill(added, end_id)
    made["attention_mask"] = made["attention_mask"].masked_fill(after, 0).masked_fill(added, 1)
    return made


def _run(labels: list[int], stop: int) -> list[int]:
    """The tokens of the answer that ends at `stop`."""
    start = stop
    while start and labels[start - 1] != IGNORED:
        start -= 1
    return labels[start:stop]
