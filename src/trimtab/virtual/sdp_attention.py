"""Scaled dot product attention: CUDA's choice of a kernel (sdp_backends.py), the CPU's values.

Ordinary tensors take the CPU's kernels, so that values are those of the CPU bit for bit. Sharded tensors take the
operations that CUDA has for its kernels, for which they have rules (sdp_kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from trimtab.virtual import amp, faults, functions, sdp_backends, sharded
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
    if torch.is_autocast_enabled("cuda"):
        return amp.in_lower_precision(_attention, args, kwargs)
    return _attention(*args, **kwargs)


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
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    options: dict[str, Any] = {"scale": scale}
    if backend != MATH and any(tensor.__class__ in sharded.SHARDED for tensor in (query, key, value)):
        return _fused(backend, (query, key, value), mask, dropout_p, is_causal, options)  # type: ignore[no-any-return]
    options["enable_gqa"] = enable_gqa
    if type(query) in VIRTUAL and not (mask is not None and mask.requires_grad):
        shown = [payload_of(tensor) for tensor in (query, key, value)]
        shown_mask = payload_of(mask) if mask is not None else None
        choice = cpu_choice(backend, (*shown, shown_mask, dropout_p, is_causal), options)
        if choice == FLASH:
            flash = aten._scaled_dot_product_flash_attention_for_cpu.default
            return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]
    plain = torch._scaled_dot_product_attention_math
    return plain(query, key, value, mask, dropout_p, is_causal, None, **options)[0]


def _fused(backend: int, qkv: Any, mask: Any, dropout: float, causal: bool, options: dict[str, Any]) -> Any:
    """CUDA's own operation, for tensors whose class has rules for it."""
    if backend == FLASH:
        return aten._scaled_dot_product_flash_attention(*qkv, dropout, causal, False, **options)[0]
    keeps = any(tensor.requires_grad for tensor in qkv)
    if backend == EFFICIENT:
        return aten._scaled_dot_product_efficient_attention(*qkv, mask, keeps, dropout, causal, **options)[0]
    return aten._scaled_dot_product_cudnn_attention(*qkv, mask, keeps, dropout, causal, False, **options)[0]


def cpu_choice(backend: int, args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """The kernel that the CPU takes for what CUDA computes with this one: its own switches do not know CUDA's."""
    if backend == MATH:
        return MATH if not torch._C._get_flash_sdp_enabled() else int(_choice(args, options))
    with _switches(flash=True, plain=True):
        return int(_choice(args, options))


def _choice(args: tuple[Any, ...], options: dict[str, Any]) -> int:
    shown: list[Any] = [_memory_like(value) if isinstance(value, Tensor) else value for value in args]
    with torch._C._DisableTorchDispatch():
        return int(torch._fused_sdp_choice(*shown, **options))


def _memory_like(payload: Tensor) -> Tensor:
    """What the choice of a kernel looks at: shapes and types. Memory that is never touched costs nothing."""
    if not payload.is_meta:
        return payload
    with torch._C._DisableTorchDispatch():
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
    """torch's own multi_head_attention_forward: its body calls attention where the function mode is put aside."""
    native: Any = nn.functional.multi_head_attention_forward
    names = {**native.__globals__, "scaled_dot_product_attention": _from_body}
    made = FunctionType(native.__code__, names, native.__name__, native.__defaults__, native.__closure__)
    made.__kwdefaults__ = native.__kwdefaults__
    return made


def _from_body(*args: Any, **kwargs: Any) -> Any:
    return attention(nn.functional.scaled_dot_product_attention, args, kwargs)


def multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.functional.multi_head_attention_forward."""
    virtual = any(value.__class__ in VIRTUAL for value in (*args, *kwargs.values()))
    return (_multi_head() if virtual else func)(*args, **kwargs)


functions.HANDLERS[nn.functional.scaled_dot_product_attention] = attention
functions.HANDLERS[nn.functional.multi_head_attention_forward] = multi_head
