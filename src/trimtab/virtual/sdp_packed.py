"""FlashAttention's own operations (aten::_flash_attention_forward and backward), computed on payloads.

Sequences of a packed row are taken one after the other. Nothing is dropped; windows other than a causal mask, and pages
of a cache, are not simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import sdp_kernels, state


def _plain(dropout: float, causal: bool, left: Any, right: Any, options: dict[str, Any]) -> bool:
    """Whether attention is causal; refuses what is neither that nor whole."""
    odd = [name for name, value in options.items() if value is not None and name != "num_splits"]
    if odd or dropout or left not in (None, -1) or right not in (None, -1, 0):
        what = ", ".join(odd) or ("dropout" if dropout else "windows")
        raise state.NotSimulated(f"FlashAttention with {what} is not simulated by virtual GPUs.")
    return causal or right == 0


def _parts(starts_q: Any, starts_k: Any) -> Iterator[tuple[slice, slice]]:
    ends = [starts.tolist() for starts in (starts_q, starts_k)]
    rows, keys = ([slice(*pair) for pair in itertools.pairwise(at)] for at in ends)
    yield from zip(rows, keys, strict=True)


def _heads_first(tensor: Tensor, part: slice) -> Tensor:
    return tensor[part].transpose(0, 1)[None]


def _back(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Any,
    starts_k: Any,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
    **options: Any,
) -> Any:
    causal = 2 if _plain(dropout, is_causal, window_size_left, window_size_right, options) else 0
    state_of_random, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    rest = state_of_random, unused, q.new_empty(0)
    if starts_q is None:
        turned = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, sums, _ = sdp_kernels.forward(*turned, None, 0.0, causal, scale)
        return torch.empty_like(q).copy_(out.transpose(1, 2)), sums, *rest
    out, sums = torch.empty_like(q), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)
    for rows, keys in _parts(starts_q, starts_k):
        operands = _heads_first(q, rows), _heads_first(k, keys), _heads_first(v, keys)
        made, lse, _ = sdp_kernels.forward(*operands, None, 0.0, causal, scale)
        out[rows] = _back(made)
        sums[:, rows] = lse[0].float()
    return out, sums, *rest


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts_q: Any,
    starts_k: Any,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    seed: Any,
    unused: Any,
    *,
    scale: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
) -> Any:
    causal = 2 if _plain(dropout, is_causal, window_size_left, window_size_right, {}) else 0
    if starts_q is None:
        turned = grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        made = sdp_kernels.backward(
            *turned, None, out.transpose(1, 2), sums, 0.0, causal, scale, sdp_kernels.seed_for(0.0)
        )
        return tuple(
            torch.empty_like(like).copy_(g.transpose(1, 2)) for g, like in zip(made, (q, k, v), strict=False)
        )
    grads = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    for rows, keys in _parts(starts_q, starts_k):
        operands = (
            _heads_first(grad, rows),
            _heads_first(q, rows),
            _heads_first(k, keys),
            _heads_first(v, keys),
        )
        made = sdp_kernels.backward(
            *operands,
            None,
            _heads_first(out, rows),
            sums[:, rows][None],
            0.0,
            causal,
            scale,
            sdp_kernels.seed_for(0.0),
        )
        for target, part, found in zip(grads, (rows, keys, keys), made, strict=False):
            target[part] = _back(found)
    return tuple(grads)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _forward,
    "_flash_attention_backward": _backward,
}
