"""Which kernel of scaled dot product attention CUDA would take, and why it takes none. Computes nothing.

The conditions are those that an H200 showed (torch 2.11) and torch's sdp_utils.cpp says. What is known of one kind of
GPU only is not refused on others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from trimtab.virtual import faults, origin, state
from trimtab.virtual.tensor import VIRTUAL

NONE = "No available kernel. Aborting execution."
_SHORT = (torch.float16, torch.bfloat16)
_NAMES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float64: "double"}
MATH, FLASH, EFFICIENT, CUDNN = (
    int(backend.value)
    for backend in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
)

_DEFAULT = torch._C._get_sdp_priority_order()


@dataclass(frozen=True)
class Asked:
    """What is asked of attention: operands, options, and the compute capability of the GPU."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]


def asked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Asked:
    """The same from the arguments of the function."""
    inner: Any = getattr(query, "_local_tensor", query)
    machine = state.machine()
    slot = inner._slot if type(inner) in VIRTUAL else machine.at(None) if machine is not None else None
    capability = slot.capability if slot is not None else (9, 0)
    return Asked(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)


def _shapes(given: Asked) -> str:
    """What every fused kernel wants."""
    q, k, v = given.query, given.key, given.value
    if not q.dim() == k.dim() == v.dim() == 4:
        return (
            "All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: "
            f"{q.dim()}, Key dim: {k.dim()}, Value dim: {v.dim()} instead."
        )
    if 0 in (q.size(2), k.size(2)):
        return "All fused kernels do not support zero seq_len_q or seq_len_kv."
    if not q.size(0) == k.size(0) == v.size(0):
        return "Both fused kernels require query, key and value to have the same batch size."
    return ""


def _heads(given: Asked, groups: bool) -> str:
    q, k, v = (tensor.size(1) for tensor in (given.query, given.key, given.value))
    if q == k == v or (groups and given.grouped and k == v and k and q % k == 0):
        return ""
    return "For dense inputs, both fused kernels require query, key and value to have the same num_heads."


def _types(given: Asked, allowed: tuple[torch.dtype, ...]) -> str:
    found = [tensor.dtype for tensor in (given.query, given.key, given.value)]
    if all(dtype in allowed for dtype in found):
        return ""
    names = [_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in found]
    return (
        "Expected query, key and value to all be of dtype: "
        f"{{{', '.join(_NAMES[dtype] for dtype in allowed)}}}. Got Query dtype: {names[0]}, Key dtype: {names[1]}, and "
        f"Value dtype: {names[2]} instead."
    )


def _sizes(given: Asked) -> tuple[int, int, int]:
    return given.query.size(-1), given.key.size(-1), given.value.size(-1)


def _dense(given: Asked) -> str:
    """The last dimension lies in one piece."""
    tensors = [given.query, given.key, given.value, *([] if given.mask is None else [given.mask])]
    if all(tensor.size(-1) == 1 or tensor.stride(-1) == 1 for tensor in tensors):
        return ""
    return "All fused kernels require the last dimension of the input to have stride 1."


def flash(given: Asked) -> str:
    """Why FlashAttention is not used; empty where it is."""
    if given.capability < (8, 0):
        return "Flash attention only supports gpu architectures in the range [sm80, sm121]."
    if given.mask is not None:
        return "Flash Attention does not support non-null attn_mask."
    if common := _shapes(given) or _types(given, _SHORT) or _heads(given, groups=True):
        return common
    sizes = _sizes(given)
    if len(set(sizes)) > 1 or sizes[0] > 256:
        return (
            "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. Got "
            f"Query.size(-1): {sizes[0]}, Key.size(-1): {sizes[1]}, Value.size(-1): {sizes[2]} instead."
        )
    if given.causal and given.query.size(2) != given.key.size(2):
        return (
            "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: "
            f"{given.query.size(2)} seqlen_k: {given.key.size(2)}. If you would like to use causal attention with "
            "non-square masks, please see CausalAttnMask."
        )
    return _dense(given)


def efficient(given: Asked) -> str:
    """Why memory-efficient attention is not used; empty where it is."""
    new = given.capability >= (8, 0)
    allowed = (torch.float16, torch.bfloat16, torch.float32) if new else (torch.float16, torch.float32)
    if common := _shapes(given) or _types(given, allowed) or _heads(given, groups=False):
        return common
    short = given.query.dtype in _SHORT
    alignment = 8 if short and given.capability >= (7, 0) else 4 if new else 1
    query, key, value = _sizes(given)
    if query != key or query % alignment or value % alignment:
        return (
            f"Mem efficient attention requires last dimension of inputs to be divisible by {alignment}. Got "
            f"Query.size(-1): {query}, Key.size(-1): {key}, Value.size(-1): {value} instead."
        )
    return _dense(given)


def cudnn(given: Asked) -> str:
    """Why cuDNN's attention is not used; empty where it is."""
    if given.capability < (8, 0):
        return "cuDNN SDPA only supports gpu architectures of sm80 and newer."
    if common := _shapes(given) or _types(given, _SHORT) or _heads(given, groups=True):
        return common
    query, key, value = _sizes(given)
    if query != key or query % 8 or value % 8 or max(query, value) > 256:
        return (
            "cuDNN SDPA requires head dimensions that are multiples of 8 and not above 256. Got "
            f"Query.size(-1): {query}, Key.size(-1): {key}, Value.size(-1): {value} instead."
        )
    if given.mask is not None and given.mask.requires_grad:
        return "cuDNN Attention does not support attn_mask that requires gradients."
    return _dense(given)


_FUSED: dict[int, tuple[str, Callable[[], bool], Callable[[Asked], str]]] = {
    EFFICIENT: ("Memory efficient kernel", torch._C._get_mem_efficient_sdp_enabled, efficient),
    FLASH: ("Flash attention kernel", torch._C._get_flash_sdp_enabled, flash),
    CUDNN: ("cuDNN attention kernel", torch._C._get_cudnn_sdp_enabled, cudnn),
}
_DISABLED = {
    EFFICIENT: "Memory Efficient attention has been runtime disabled.",
    FLASH: "Flash attention has been runtime disabled.",
    CUDNN: "cuDNN attention has been runtime disabled.",
}


def why_not(backend: int, given: Asked) -> str:
    """Why a fused kernel is not used, in CUDA's words; empty where it is."""
    _, enabled, reason = _FUSED[backend]
    return reason(given) if enabled() else _DISABLED[backend]


def choose(given: Asked) -> int:
    """The kernel that CUDA takes. Where there is none a fault is reported, as CUDA does; repaired, it is MATH."""
    order = torch._C._get_sdp_priority_order()
    if order == _DEFAULT and given.capability[0] in (9, 10):
        order = [CUDNN, *order]  # preferred there while a program has set no order
    for backend in order:
        if backend == MATH and torch._C._get_math_sdp_enabled():
            _note(given)
            return MATH
        if backend in _FUSED and not why_not(backend, given):
            return int(backend)
    for backend, (name, _, _) in _FUSED.items():
        warnings.warn(f"{name} not used because:", stacklevel=2)
        warnings.warn(why_not(backend, given), stacklevel=2)
    named = [("query", given.query), ("key", given.key), ("value", given.value)]
    faults.report("backend-unsupported", NONE, "aten.scaled_dot_product_attention", named, RuntimeError)
    return MATH


def _note(given: Asked) -> None:
    """Why the kernel that keeps the scores of all pairs is taken: in the words of the one that asks for least."""
    machine = state.machine()
    if machine is not None and machine.observer is not None and (line := origin.here()) is not None:
        machine.plain_attention.setdefault(line, why_not(EFFICIENT, given))


def _asking(backend: int) -> Callable[..., bool]:
    def can_use(params: Any, debug: bool = False) -> bool:
        options = (params.attn_mask, params.dropout, params.is_causal)
        given = asked(params.query, params.key, params.value, *options, enable_gqa=params.enable_gqa)
        reason = why_not(backend, given)
        if reason and debug:
            warnings.warn(reason, stacklevel=2)
        return not reason

    return can_use


def names() -> dict[str, Any]:
    """Names of `torch._C` that only a CUDA build has."""
    return {
        "_is_flash_attention_available": lambda: True,
        "_can_use_flash_attention": _asking(FLASH),
        "_can_use_mem_efficient_attention": _asking(EFFICIENT),
        "_can_use_cudnn_attention": _asking(CUDNN),
    }
