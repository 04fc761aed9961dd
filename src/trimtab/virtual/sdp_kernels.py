"""The operations that CUDA has for its kernels of attention, computed on payloads.

By the CPU's own kernel where it has one for them, so that values are those of the CPU bit for bit. Else from their
definition, in 32 bits, gradients too; what is dropped is drawn again from the seed: that is for sharded tensors and
programs that name these operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import state


class _Scores:
    """The weights of attention from their definition. A causal mask begins at the first query (1) or ends at the last
    (2)."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        bias: Any,
        causal: int,
        scale: float | None,
        dropout: float,
        seed: Any,
    ) -> None:
        self.scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        self.groups = query.size(1) // max(key.size(1), 1)
        scores = query.float() @ self.wide(key).mT * self.scale
        if bias is not None:
            scores = scores + bias.float()
        if causal:
            rows, columns = scores.shape[-2:]
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows if causal == 2 else 0)
            scores = scores.masked_fill(~seen, float("-inf"))
        self.sums = scores.logsumexp(-1)
        self.weights = torch.softmax(scores, -1)
        self.kept = torch.ones(())
        if dropout > 0:
            source = torch.Generator().manual_seed(int(seed))
            drawn = torch.rand(self.weights.shape, generator=source)
            self.kept = (drawn >= dropout) / (1 - dropout)

    def wide(self, heads: Tensor) -> Tensor:
        """Keys or values, repeated for the queries of a group."""
        return heads.float().repeat_interleave(self.groups, 1) if self.groups > 1 else heads.float()

    def narrow(self, grad: Tensor, like: Tensor) -> Tensor:
        """The gradient of what was repeated."""
        if self.groups > 1:
            grad = grad.unflatten(1, (like.size(1), self.groups)).sum(2)
        return grad.to(like.dtype)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: int) -> bool:
    """Whether the CPU has a kernel: nothing is dropped, heads are of one size, its causal mask begins at the first."""
    alike = q.size(-1) == k.size(-1) == v.size(-1)
    return not dropout and alike and (causal != 2 or q.size(2) == k.size(2)) and min(q.numel(), k.numel()) > 0


def seed_for(dropout: float) -> Tensor:
    """A seed to draw from, where anything is dropped."""
    return torch.randint(1 << 62, ()) if dropout > 0 else torch.zeros((), dtype=torch.int64)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, dropout: float, causal: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Results, the logarithms of the rows' sums, and the seed of what was dropped; heads come before rows."""
    seed = seed_for(dropout)
    if _has_kernel(q, k, v, dropout, causal):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *kernel(q, k, v, 0.0, bool(causal), attn_mask=bias, scale=scale), seed
    scores = _Scores(q, k, bias, causal, scale, dropout, seed)
    out = ((scores.weights * scores.kept) @ scores.wide(v)).to(q.dtype)
    return out, scores.sums, seed


def _rows_first(tensor: Tensor) -> Tensor:
    """In memory the heads come after the rows: as the memory-efficient kernels leave it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_as(tensor: Tensor, other: Tensor) -> Tensor:
    """In memory as the operand lies: as the other kernels leave it."""
    return torch.empty_like(other).copy_(tensor) if tensor.shape == other.shape else _rows_first(tensor)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    out: Tensor,
    sums: Tensor,
    dropout: float,
    causal: int,
    scale: float | None,
    seed: Any,
    of_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The gradients of queries, keys and values, and of the scores where a bias wants its own."""
    if _has_kernel(q, k, v, dropout, causal) and not of_bias:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        rows = sums[..., : q.size(2)]
        return *kernel(grad, q, k, v, out, rows, 0.0, bool(causal), attn_mask=bias, scale=scale), None
    scores = _Scores(q, k, bias, causal, scale, dropout, seed)
    wide = grad.float()
    of_weights = (wide @ scores.wide(v).mT) * scores.kept
    mean = (wide * out.float()).sum(-1, keepdim=True)
    of_scores = scores.weights * (of_weights - mean)
    return (
        (of_scores @ scores.wide(k) * scores.scale).to(q.dtype),
        scores.narrow(of_scores.mT @ q.float() * scores.scale, k),
        scores.narrow((scores.weights * scores.kept).mT @ wide, v),
        of_scores,
    )


def _flash(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    # Its causal mask is aligned to the last query and the last key.
    out, sums, seed = forward(q, k, v, None, dropout_p, 2 if is_causal else 0, scale)
    size = q.size(2), k.size(2)
    return _laid_as(out, q), sums, None, None, *size, seed, torch.zeros_like(seed), q.new_empty(0)


def _flash_backward(*args: Any, scale: Any = None) -> Any:
    grad, q, k, v, out, sums, _, _, _, _, dropout, causal, seed, _ = args
    made = backward(grad, q, k, v, None, out, sums, dropout, 2 if causal else 0, scale, seed)
    return tuple(map(_laid_as, made[:3], (q, k, v)))


def _efficient(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    keeps: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, sums, seed = forward(q, k, v, bias, dropout_p, int(is_causal), scale)
    # Its sums come in steps of 32 rows.
    kept = (
        nn.functional.pad(sums, (0, -sums.size(-1) % 32), value=float("inf"))
        if keeps
        else sums[..., :0].clone()
    )
    return _rows_first(out), kept, seed, torch.zeros_like(seed)


def _efficient_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    out: Any,
    sums: Any,
    seed: Any,
    offset: Any,
    dropout: float,
    wanted: Any,
    is_causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    asked = bias is not None and wanted[3]
    made = backward(grad, q, k, v, bias, out, sums, dropout, int(is_causal), scale, seed, asked)
    of_bias = made[3].sum_to_size(bias.shape).to(bias.dtype) if asked else None
    return (*map(_rows_first, made[:3]), of_bias)


def _cudnn(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    keeps: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, sums, seed = forward(q, k, v, bias, dropout_p, int(is_causal), scale)
    size = q.size(2), k.size(2)
    return _laid_as(out, q), sums.unsqueeze(-1), None, None, *size, seed, torch.zeros_like(seed), None


def _cudnn_backward(*args: Any, scale: Any = None) -> Any:
    grad, q, k, v, out, sums, seed, _, bias, _, _, _, _, dropout, causal = args
    made = backward(grad, q, k, v, bias, out, sums.squeeze(-1), dropout, int(causal), scale, seed)
    return tuple(map(_laid_as, made[:3], (q, k, v)))


def _of_rows(q: Any, k: Any, v: Any, bias: Any, *rest: Any, scale: Any = None, **options: Any) -> Any:
    """aten::_efficient_attention_forward: the heads come after the rows."""
    of_q, of_k, _, _, dropout, mask, keeps = rest
    if of_q is not None or of_k is not None:
        raise state.NotSimulated(
            "Attention over packed sequences (cu_seqlens) is not simulated by virtual GPUs."
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out, sums, seed = forward(q, k, v, bias, dropout, mask, scale)
    kept = (
        nn.functional.pad(sums, (0, -sums.size(-1) % 32), value=float("inf"))
        if keeps
        else sums[..., :0].clone()
    )
    return _rows_first(out).transpose(1, 2), kept, seed, torch.zeros_like(seed), q.size(2), k.size(2)


def _of_rows_backward(*args: Any, scale: Any = None, **options: Any) -> Any:
    grad, q, k, v, bias, out, _, _, _, _, sums, dropout, seed, _, mask, _ = args
    grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
    made = backward(grad, q, k, v, bias, out, sums, dropout, mask, scale, seed, bias is not None)
    of_bias = made[3].sum_to_size(bias.shape).to(bias.dtype) if bias is not None else None
    return (*(_rows_first(tensor).transpose(1, 2) for tensor in made[:3]), of_bias)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_efficient_attention_forward": _of_rows,
    "_efficient_attention_backward": _of_rows_backward,
}
