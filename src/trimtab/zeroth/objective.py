"""The loss that zeroth-order steps compare: candidates scored by the mean log-probability of their own tokens.

Only the positions that predict a scored token go through the model's head. Needs torch alone; it never tokenizes,
and never decides where anything lives: ids go to the model's first layer, indices to where the logits are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Elements of logits turned to fp32 at a time; a whole vocabulary for every row would double the logits' memory.
_FP32_CHUNK = 1 << 24


@dataclass(frozen=True)
class Example:
    """One question as token ids: a prompt that all candidates share, and the gold one's position."""

    prompt: list[int]
    candidates: list[list[int]]
    label: int
    """-1 where it is not known."""

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longest candidate."""
        return len(self.prompt) + max(map(len, self.candidates))

    @property
    def rows(self) -> int:
        """Rows of a forward: candidates of a single token share the prompt's."""
        return 1 if max(map(len, self.candidates)) == 1 else len(self.candidates)


@dataclass(frozen=True)
class ScoreBatch:
    """Left-padded rows on the CPU, and which of their next-token probabilities make up each candidate's score.

    An example's only candidate is the answer, and the loss is its negative score.
    """

    input_ids: Tensor
    """[R, T] int64"""
    attention_mask: Tensor
    """[R, T]"""
    keep: int
    """Logits are needed for this many last positions only."""
    row: Tensor
    """[S]: the row of each scored token"""
    position: Tensor
    """[S]: which of the kept positions predicts it"""
    token: Tensor
    """[S]: its id"""
    candidate: Tensor
    """[S]: the candidate that it belongs to, as example * K + option"""
    length: Tensor
    """[E, K]: scored tokens of each candidate; 0 where there is no such candidate"""
    label: Tensor
    """[E]: the gold candidate; -1 where it is not known"""

    @property
    def examples(self) -> int:
        return self.length.shape[0]


def build_batch(
    examples: Sequence[Example],
    pad_id: int,
    max_length: int,
    pad_to_multiple: int = 1,
    bos_id: int | None = None,
) -> ScoreBatch:
    """Lay out examples as rows. A candidate's last token is only predicted, so it is never part of a row.

    An example whose candidates are single tokens takes one row; otherwise each candidate has its own. A prompt that
    is too long loses its left end, but for `bos_id` where it starts with that.
    """
    rows: list[list[int]] = []
    scored: list[tuple[int, int, int, int]] = []  # row, tokens from the candidate's end, token, candidate
    options = max(len(example.candidates) for example in examples)
    length = torch.zeros(len(examples), options, dtype=torch.int64)
    for e, example in enumerate(examples):
        if not example.prompt or not example.candidates or not all(example.candidates):
            raise ValueError(
                f"example {e} of the batch: the prompt and each candidate need at least one token"
            )
        longest = max(map(len, example.candidates))
        prompt = _cut(example.prompt, max_length - longest, bos_id)
        if longest == 1:
            rows.append(prompt)
        for k, candidate in enumerate(example.candidates):
            length[e, k] = len(candidate)
            if longest > 1:
                rows.append(prompt + candidate[:-1])
            scored += [
                (len(rows) - 1, len(candidate) - j, token, e * options + k)
                for j, token in enumerate(candidate)
            ]
    width = -(-max(map(len, rows)) // pad_to_multiple) * pad_to_multiple
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for r, row in enumerate(rows):
        ids[r, width - len(row) :] = torch.tensor(row)
        mask[r, width - len(row) :] = 1
    keep = int(length.max())
    row_of, from_end, token_of, candidate_of = torch.tensor(scored, dtype=torch.int64).unbind(1)
    label = torch.tensor([example.label for example in examples], dtype=torch.int64)
    return ScoreBatch(ids, mask, keep, row_of, keep - from_end, token_of, candidate_of, length, label)


def _cut(prompt: list[int], room: int, bos_id: int | None) -> list[int]:
    if len(prompt) <= room:
        return prompt
    head = prompt[:1] if bos_id is not None and prompt[0] == bos_id else []
    if room <= len(head):
        raise ValueError("a candidate leaves no room for its prompt: raise max_length")
    return head + prompt[len(prompt) - room + len(head) :]


def position_ids(mask: Tensor) -> Tensor:
    """Positions counted from each row's first real token, so that padding on the left changes nothing."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def candidate_scores(model: nn.Module, batch: ScoreBatch, lanes: int = 1) -> Tensor:
    """[lanes, E, K]: mean log-probability of each candidate's tokens, in fp32; -inf where there is no candidate.

    With more than one lane the rows are repeated, lane after lane, and it is the model's layers that tell them apart.
    """
    mask = batch.attention_mask.repeat(lanes, 1)
    logits = kept_logits(model, batch.input_ids.repeat(lanes, 1), mask, batch.keep)  # [lanes * R, keep, V]
    device, rows = logits.device, batch.input_ids.shape[0]
    at = (torch.arange(lanes)[:, None] * rows + batch.row).to(device)  # [lanes, S]
    position, token = batch.position.to(device), batch.token.to(device)
    chosen = logits[at, position, token].float() - _logsumexp(logits)[at, position]
    # Each token has a place of its own in a dense table: adding up by index would depend on the order on a GPU.
    order, candidate, place = places_in_table(batch)
    table = chosen.new_zeros(lanes, batch.length.numel(), batch.keep)
    lane = torch.arange(lanes, device=device)[:, None]
    into = (lane, candidate.to(device), place.to(device))
    table = table.index_put(into, chosen[:, order.to(device)])
    length = batch.length.to(device)
    mean = table.sum(-1).view(lanes, *length.shape) / length.clamp(min=1)
    return mean.masked_fill(length == 0, -torch.inf)


def kept_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, keep: int) -> Tensor:
    """Logits of the last `keep` positions of left-padded rows, whatever of this the model's forward knows."""
    known = _forward_parameters(model)
    device = _input_device(model)
    inputs: dict[str, Any] = {
        "input_ids": input_ids.to(device),
        "attention_mask": attention_mask.to(device),
    }
    if "position_ids" in known:
        inputs["position_ids"] = position_ids(attention_mask).to(device)
    if "use_cache" in known:
        inputs["use_cache"] = False
    if "logits_to_keep" in known:
        inputs["logits_to_keep"] = keep
    output: Any = model(**inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[:, -keep:]


def places_in_table(batch: ScoreBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The scored tokens ordered by candidate, and each one's row (its candidate) and column in a dense table."""
    order = torch.argsort(batch.candidate, stable=True)
    candidate, count = batch.candidate[order], batch.length.flatten()
    first = count.cumsum(0) - count
    return order, candidate, torch.arange(order.numel()) - first[candidate]


def example_losses(scores: Tensor, label: Tensor) -> Tensor:
    """[lanes, E]: cross-entropy over the candidates, or the negative score where there is only the answer.

    NaN where the gold candidate is not known. An example's loss is its own, whatever else is in its batch.
    """
    if scores.shape[-1] == 1:
        return -scores[..., 0]
    label = label.to(scores.device)
    gold = label.clamp(min=0).expand(scores.shape[:-1])[..., None]
    losses = torch.logsumexp(scores, -1) - scores.gather(-1, gold)[..., 0]
    losses = losses.masked_fill(label < 0, torch.nan)
    alone = (scores != -torch.inf).sum(-1) == 1
    return torch.where(alone, -scores.amax(-1), losses)


def _logsumexp(logits: Tensor) -> Tensor:
    """In fp32, a few rows at a time where the logits are of another type."""
    if logits.dtype == torch.float32:
        return torch.logsumexp(logits, -1)
    rows = max(1, _FP32_CHUNK // (logits.shape[1] * logits.shape[2]))
    return torch.cat([torch.logsumexp(part.float(), -1) for part in logits.split(rows)])


def _forward_parameters(model: nn.Module) -> frozenset[str]:
    """What the forward of the model itself takes, under an adapter's or a process group's wrapping."""
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        else:
            return frozenset(inspect.signature(type(inner).forward).parameters)


def _input_device(model: nn.Module) -> torch.device:
    """Where the first layer is: a split model takes its ids there."""
    layer: Any = getattr(model, "get_input_embeddings", lambda: model)()
    parameter = next(layer.parameters(), None)
    return parameter.device if parameter is not None else next(model.parameters()).device
