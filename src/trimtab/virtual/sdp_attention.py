"""Scaled dot product attention: CUDA's choice of a kernel (sdp_backends.py), the CPU's values.

What CUDA computes by one kernel is here the operation that CUDA has for it (sdp_kernels.py): it leaves behind and keeps
what that kernel does, and its values are the CPU's bit for bit. Where the CPU has no such kernel (weights are dropped,
values have heads of another size), and values are wanted, they come from its definition (sdp_aside.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from trimtab.virtual import amp, faults, functions, sdp_aside, sdp_backends, sharded, state
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.plans import Args, Plan
from trimtab.virtual.sdp_backends import EFFICIENT, FLASH, MATH
from trimtab.virtual.tensor import VIRTUAL, payload_of

aten = torch.ops.aten
_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.functional.scaled_dot_product_attention: C++ would choose its kernel by the meta device."""
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    values = (*args, *kwargs.values())
    if not any(value.__class__ in VIRTUAL or value.__class__ in sharded.SHARDED for value in values):
        return func(*args, **kwargs)
    if isinstance(mask, CausalBias):
        with functions.switched_on():
            return type(mask).__torch_function__(func, (type(mask),), args, kwargs)
    return amp.in_lower_precision(_attention, args, kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    named = [("query", query), ("key", key), ("value", value)]
    if not (query.device == key.device == value.device):
        message = (
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
        faults.report("device-mismatch", message, "aten.scaled_dot_product_attention", named)
        key, value = key.to(query.device), value.to(query.device)
    if not (query.dtype is key.dtype is value.dtype):
        q, k, v = (_TYPES.get(tensor.dtype, str(tensor.dtype)) for tensor in (query, key, value))
        message = (
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {q} key.dtype: {k} and "
            f"value.dtype: {v} instead."
        )
        op = "aten.scaled_dot_product_attention"
        faults.report("dtype-mismatch", message, op, named, RuntimeError)
        key, value = key.to(query.dtype), value.to(query.dtype)
    given = sdp_backends.asked(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    backend = sdp_backends.choose(given)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), float("-inf"), dtype=query.dtype, device=mask.device))
    options: dict[str, Any] = {"scale": scale}
    virtual = type(query) in VIRTUAL
    if backend != MATH and any(tensor.__class__ in sharded.SHARDED for tensor in (query, key, value)):
        return _fused(backend, query, key, value, mask, dropout_p, is_causal, scale)
    options["enable_gqa"] = enable_gqa
    machine = state.machine()
    if virtual and backend != MATH and machine is not None and machine.shapes:
        return _fused(backend, query, key, value, mask, dropout_p, is_causal, scale)
    if virtual and not (mask is not None and mask.requires_grad):
        shown = [payload_of(tensor) for tensor in (query, key, value)]
        shown_mask = payload_of(mask) if mask is not None else None
        choice = cpu_choice(backend, (*shown, shown_mask, dropout_p, is_causal), options)
        if choice == FLASH and backend != MATH:
            return _fused(backend, query, key, value, mask, dropout_p, is_causal, scale)
        if choice == FLASH and (machine is None or not machine.shapes):
            flash = aten._scaled_dot_product_flash_attention_for_cpu.default
            return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        if virtual and 0 < dropout_p < 1:
            return _dropping(q, k, v, bias, dropout_p, is_causal, scale, enable_gqa)
        return torch._scaled_dot_product_attention_math(q, k, v, bias, dropout_p, is_causal, None, **options)[
            0
        ]

    if virtual and backend != MATH:
        return sdp_aside.attend(backend, plain, query, key, value, mask)
    return plain(query, key, value, mask)


def _dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """aten::_scaled_dot_product_attention_math with weights dropped as CUDA does: one kernel keeps a byte each.

    C++ has no such kernel for the device that it sees, and would keep the noise as wide as the weights.
    """
    dtype = query.dtype
    wide = (
        dtype in (torch.float16, torch.bfloat16)
        and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    )
    # As in C++, each of these is there until the end.
    q, k, v = (tensor.float() if wide else tensor for tensor in (query, key, value))
    if grouped:
        k, v = (t.repeat_interleave(q.size(-3) // t.size(-3), -3) for t in (k, v))
    by = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    root = math.sqrt(abs(by))
    scaled = q * math.copysign(root, by)
    if causal:
        seen = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(seen.logical_not(), float("-inf"))
    weights = scaled @ (k.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    weights = torch.native_dropout(weights, dropout, True)[0]
    told = weights.to(dtype)  # C++ gives the weights too, which it makes before the result
    out = (weights @ v).to(dtype)
    del told
    return out


def _fused(
    backend: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """CUDA's own operation, on operands as torch makes them ready for it."""
    if backend == FLASH:
        head = query.size(-1)
        scale = 1 / math.sqrt(head) if scale is None else scale
        if -head % 8:
            query, key, value = (nn.functional.pad(tensor, (0, -head % 8)) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )[0]
        return out[..., :head] if -head % 8 else out  # type: ignore[no-any-return]
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if backend == EFFICIENT:
        if mask is not None:
            mask = _aligned(mask, query, key)
            keeps = keeps or (torch.is_grad_enabled() and mask.requires_grad)
        fused = aten._scaled_dot_product_efficient_attention
        return fused(query, key, value, mask, keeps, dropout, causal, scale=scale)[0]  # type: ignore[no-any-return]
    fused = aten._scaled_dot_product_cudnn_attention
    return fused(query, key, value, mask, keeps, dropout, causal, False, scale=scale)[0]  # type: ignore[no-any-return]


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask for every head, its rows apart by a multiple of 8."""
    columns = mask.size(-1)
    if columns % 8:
        mask = nn.functional.pad(mask, (0, -columns % 8))[..., :columns]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def cpu_choice(backend: int, args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """The kernel that the CPU takes for what CUDA computes with this one: its own switches do not know CUDA's."""
    if backend == MATH:
        return MATH if not torch._C._get_flash_sdp_enabled() else int(_choice(args, options))
    with _switches(flash=True, plain=True):
        return int(_choice(args, options))


def _choice(args: tuple[Any, ...], options: dict[str, Any]) -> int:
    shown: list[Any] = [_memory_like(value) if isinstance(value, Tensor) else value for value in args]
    with past_dispatch():
        return int(torch._fused_sdp_choice(*shown, **options))


def _memory_like(payload: Tensor) -> Tensor:
    """What the choice of a kernel looks at: shapes and types. Memory that is never touched costs nothing."""
    if not payload.is_meta:
        return payload
    with past_dispatch():
        return torch.empty_strided(payload.size(), payload.stride(), dtype=payload.dtype, device="cpu")


@contextmanager
def _switches(flash: bool, plain: bool) -> Iterator[None]:
    before = torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_math(plain)
    try:
        yield
    finally:
        torch._C._set_sdp_use_flash(before[0])
        torch._C._set_sdp_use_math(before[1])


def choose_below(*args: Any, **options: Any) -> int:
    """aten::_fused_sdp_choice on payloads, reached from C++: what CUDA can do the CPU does by one of its kernels."""
    backend = sdp_backends.choose(sdp_backends.asked(*args, **options))
    return cpu_choice(backend, args, options)


def refuse_below(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """The same where the CPU would choose without a word: CUDA may have no kernel."""
    sdp_backends.choose(sdp_backends.asked(*args))
    return payloads


@cache
def _multi_head() -> Any:
    """torch's own multi_head_attention_forward, whose body does not offer itself to the function mode again."""
    native: Any = nn.functional.multi_head_attention_forward
    names = {**native.__globals__, "has_torch_function": lambda operands: False}
    made = FunctionType(native.__code__, names, native.__name__, native.__defaults__, native.__closure__)
    made.__kwdefaults__ = native.__kwdefaults__
    return made


def multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.functional.multi_head_attention_forward: what its body calls (projections, attention, dropout) is seen too."""
    if not any(value.__class__ in VIRTUAL for value in (*args, *kwargs.values())):
        return func(*args, **kwargs)
    with functions.INSIDE:
        return _multi_head()(*args, **kwargs)


functions.HANDLERS[nn.functional.scaled_dot_product_attention] = attention
functions.HANDLERS[nn.functional.multi_head_attention_forward] = multi_head
