"""Cross-entropy of a chunk of logits in one launch: the loss of each row, and in place of the logits their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _score(x, scale, softcap, SOFTCAP: tl.constexpr):
    x = x.to(tl.float32) * scale
    if SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return x


@triton.jit
def _cross_entropy(
    logits, stride, labels, losses, correct, entropy, columns, scale, softcap,
    SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    label = tl.load(labels + row)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighed = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        ok = column < columns
        x = _score(tl.load(here + column, mask=ok, other=0.0), scale, softcap, SOFTCAP)
        x = tl.where(ok, x, float("-inf"))
        higher = tl.maximum(most, tl.max(x, 0))
        shrunk = tl.exp(most - higher)
        e = tl.exp(x - higher)
        total = total * shrunk + tl.sum(e, 0)
        weighed = weighed * shrunk + tl.sum(tl.where(ok, e * x, 0.0), 0)
        most = higher
    log_total = most + tl.log(total)
    labelled = label >= 0
    wanted = _score(tl.load(here + tl.maximum(label, 0)), scale, softcap, SOFTCAP)
    tl.store(losses + row, tl.where(labelled, log_total - wanted, 0.0))
    tl.store(entropy + row, tl.where(labelled, log_total - weighed / total, 0.0))
    first = columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        ok = column < columns
        x = _score(tl.load(here + column, mask=ok, other=0.0), scale, softcap, SOFTCAP)
        first = tl.minimum(first, tl.min(tl.where(ok & (x == most), column, columns), 0))
        if GRADIENT:
            p = tl.exp(x - log_total)
            p = tl.where(column == label, p - 1.0, p) * scale
            if SOFTCAP:
                p *= 1.0 - (x / softcap) * (x / softcap)
            p = tl.where(labelled, p, 0.0)
            tl.store(here + column, p.to(logits.dtype.element_ty), mask=ok)
    tl.store(correct + row, tl.where(labelled & (first == label), 1.0, 0.0))


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, scale: float, softcap: float | None, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, whether the label came first, and entropies, of each row; rows of a negative label count nothing.

    With `gradient` the logits are overwritten by the gradient of the sum of the losses.
    """
    rows, columns = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](
        logits, logits.stride(0), labels, found[0], found[1], found[2], columns, scale, softcap or 1.0,
        SOFTCAP=softcap is not None, GRADIENT=gradient, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return found[0], found[1], found[2]
