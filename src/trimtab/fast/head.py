"""Cross-entropy over a frozen head in chunks of rows: no more logits than one chunk's are ever held.

The gradient of the hidden states is made beside the loss, while a chunk's logits are there; the head itself needs none.
Only rows with a label are computed where it is known which these are. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from trimtab.fast.kernels import HALVES, usable_on
from trimtab.fast.reordered import Reordered

IGNORED = -100
_CHUNK_ELEMENTS = 1 << 28
"""Logits of a chunk at most: half a gigabyte in 16 bits."""
_LEAST_ROWS = 64
_ROWS_IN_CACHE = 8
"""Of logits on a processor: a few megabytes."""


class HeadLoss(NamedTuple):
    """All of them on the device, the last three without a gradient."""

    loss: torch.Tensor
    """Sum over the labelled rows, divided by `count`."""
    tokens: torch.Tensor
    """How many rows have a label."""
    correct: torch.Tensor
    """In how many of them the label is the likeliest token."""
    entropy: torch.Tensor
    """Sum over them, of the predicted distributions."""


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: `softcap(scale * (hidden @ weight.T + bias))`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    reordered: Reordered | None = None
    """A frozen weight once more, as a processor reads it best."""

    @property
    def trained(self) -> bool:
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before scale and softcap, in the format of what is given."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        if self.reordered is not None:
            made = self.reordered.product(hidden, self.weight.to(hidden.dtype))
            return made if bias is None else made + bias
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype), bias)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """As they are compared, in fp32 at least."""
        logits = self.logits(hidden).to(_wide(hidden))
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def back(self, slope: torch.Tensor, *, out: torch.Tensor) -> None:
        """From the slope of the logits to that of the hidden states."""
        weight = self.weight.to(slope.dtype)
        if self.reordered is None:
            torch.mm(slope, weight, out=out)
        else:
            out.copy_(self.reordered.back(slope, weight))


def head_loss(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    count: torch.Tensor | int | None = None,
    rows: torch.Tensor | None = None,
) -> HeadLoss:
    """The loss of what the head makes of `hidden` against `labels`, which already stand where they are predicted:
    labels[i] belongs to hidden[i]; -100 is none.

    `hidden` is [..., width], `labels` of the same shape without the last. `count` divides the sum; without it the
    number of labels does. `rows`: the places of the labelled rows in the flattened batch, where the caller knows them;
    on the CPU they are looked up, on a GPU that would wait for it, so that all rows are computed.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    wanted = labels.reshape(-1).to(flat.device)
    if rows is None and flat.device.type == "cpu":
        rows = (wanted != IGNORED).nonzero().squeeze(1)
    if rows is not None and len(rows) != len(flat):
        flat, wanted = flat.index_select(0, rows), wanted.index_select(0, rows)
    tokens = (wanted != IGNORED).sum()
    if torch.is_autocast_enabled(flat.device.type):
        flat = flat.to(torch.get_autocast_dtype(flat.device.type))
    total, correct, entropy = (
        _trained(flat, head, wanted) if head.trained else _Frozen.apply(flat, head, wanted)
    )
    return HeadLoss(total / (tokens.clamp(min=1) if count is None else count), tokens, correct, entropy)


def _rows_at_once(columns: int) -> int:
    return max(_LEAST_ROWS, _CHUNK_ELEMENTS // columns // 64 * 64)


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wants = ctx.needs_input_grad[0]
        sums = torch.zeros(3, dtype=_wide(hidden), device=hidden.device)
        grad = torch.empty_like(hidden) if wants else None
        step = _rows_at_once(head.weight.shape[0])
        found = _by_kernel if usable_on(hidden) and hidden.dtype in HALVES else _plainly
        for start in range(0, len(hidden), step):
            piece, wanted = hidden[start : start + step], labels[start : start + step]
            values, slope = found(piece, head, wanted, gradient=wants)
            sums += values
            if grad is not None and slope is not None:
                head.back(slope, out=grad[start : start + step])
        ctx.save_for_backward(grad)
        total, correct, entropy = sums.unbind()
        ctx.mark_non_differentiable(correct, entropy)
        return total, correct, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        # In fp32: in fp16 a gradient divided by the number of tokens would vanish before it is scaled up.
        return (grad * grads[0]).to(grad.dtype) if grad is not None else None, None, None


def _by_kernel(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from trimtab.fast.kernels.cross_entropy import cross_entropy

    logits = head.logits(hidden)
    found = cross_entropy(logits, labels, scale=head.scale, softcap=head.softcap, gradient=gradient)
    return torch.stack(found).sum(1), logits if gradient else None


def _plainly(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scores, scale, softcap = head.scores(hidden), head.scale, head.softcap
    if scores.device.type == "cpu" and softcap is None and scale == 1.0:
        return _row_by_row(scores, labels, gradient=gradient, format=hidden.dtype)
    labelled = labels != IGNORED
    at = labels.clamp(min=0).unsqueeze(1)
    correct = (scores.argmax(-1) == labels).sum()
    log_total = scores.logsumexp(-1, keepdim=True)
    losses = (log_total - scores.gather(1, at)).squeeze(1)
    chances = (scores - log_total).exp_()
    entropy = log_total.squeeze(1) - (chances * scores).sum(-1)
    values = torch.stack([(losses * labelled).sum(), correct.to(losses.dtype), (entropy * labelled).sum()])
    if not gradient:
        return values, None
    slope = chances.scatter_add_(1, at, torch.full_like(at, -1, dtype=chances.dtype))
    if softcap is not None:
        slope *= 1 - (scores / softcap) ** 2
    slope *= scale * labelled.unsqueeze(1)
    return values, slope.to(hidden.dtype)


def _row_by_row(
    scores: torch.Tensor, labels: torch.Tensor, *, gradient: bool, format: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same for a processor, a few rows at a time and in their place: every pass finds them in its cache."""
    values = torch.zeros(3, dtype=scores.dtype)
    for block, wanted in zip(scores.split(_ROWS_IN_CACHE), labels.split(_ROWS_IN_CACHE), strict=True):
        labelled = (wanted != IGNORED).to(block.dtype)
        at = wanted.clamp(min=0).unsqueeze(1)
        correct = (block.argmax(-1) == wanted).sum()
        block -= block.logsumexp(-1, keepdim=True)
        losses = -block.gather(1, at).squeeze(1)
        chances = block.exp()
        entropy = -torch.bmm(chances.unsqueeze(1), block.unsqueeze(2)).flatten()
        values += torch.stack([losses @ labelled, correct.to(losses.dtype), entropy @ labelled])
        if gradient:
            chances.scatter_add_(1, at, torch.full_like(at, -1, dtype=chances.dtype))
            torch.mul(chances, labelled.unsqueeze(1), out=block)
    return values, scores.to(format) if gradient else None


def _trained(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head that is trained needs its own gradient: a chunk's logits are made again for it in the backward pass."""

    def piece(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = head.scores(h)
        losses = torch.nn.functional.cross_entropy(scores, y, reduction="none", ignore_index=IGNORED)
        with torch.no_grad():
            chances = scores.log_softmax(-1)
            entropy = -(chances.exp() * chances).sum(-1) * (y != IGNORED)
            correct = (scores.argmax(-1) == y).sum().float()
        return losses.sum(), correct, entropy.sum()

    step = _rows_at_once(head.weight.shape[0])
    parts = [
        checkpoint(piece, h, y, use_reentrant=False) if len(hidden) > step else piece(h, y)
        for h, y in zip(hidden.split(step), labels.split(step), strict=True)
    ]
    total, correct, entropy = (torch.stack(column).sum() for column in zip(*parts, strict=True))
    return total, correct, entropy
