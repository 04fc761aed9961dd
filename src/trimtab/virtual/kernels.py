"""Where a CPU kernel and a CUDA kernel differ: types that only one of them takes, and errors worded differently.

It sees payloads only. Placement is settled before (rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.virtual import (
    batch_norm,
    determinism,
    faults,
    float8,
    half_kernels,
    memory,
    sdp_attention,
    sdp_kernels,
    sdp_packed,
    state,
)
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.wording import AcceleratorError, runtime_error, scalar_name, words

# Matrix products, and the first of the two arguments that are multiplied.
_PRODUCTS = dict.fromkeys(("mm", "bmm", "mv", "dot"), 0)
_PRODUCTS |= dict.fromkeys(("addmm", "addmm_", "baddbmm", "addmv"), 1)
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool))
_NO_PRODUCT = _INTEGERS | frozenset(float8.TYPES)
Before = Callable[[Plan, list[Any], Args], list[Any]]
"""Sees the payloads of an operation first, refuses what CUDA does not take, and gives those to go on with."""
# Types that CUDA's kernel has and the CPU's lacks, and in which its results are computed here.
_HALVES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}
_COUNTED = dict.fromkeys(_INTEGERS, torch.float64)
_ASSERTING = words(
    """
    embedding index index_put index_put_ _index_put_impl_ gather scatter scatter_ scatter_add scatter_add_
    index_select nll_loss_forward nll_loss2d_forward index_add_ index_add index_copy_ index_copy index_fill_ take
    _embedding_bag _embedding_bag_forward_only
    """
)
_UNSUPPORTED = re.compile(
    r"not (implemented for '|supported for )(Half|BFloat16)|FFT doesn't support tensors of type: (Half|ComplexHalf)"
)


def _product(left: int) -> Before:
    """Matrix products on CUDA take no integers and no two types."""

    def before(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
        kind = payloads[left].dtype
        if kind is payloads[left + 1].dtype and kind not in _NO_PRODUCT:
            return payloads
        return _refused_product(plan, payloads, args, payloads[left], payloads[left + 1])

    return before


def _refused_product(plan: Plan, payloads: list[Any], args: Args, one: Tensor, two: Tensor) -> list[Any]:
    base = plan.name.removeprefix("aten::")
    if one.dtype is two.dtype:
        kernel = "baddbmm_cuda" if "bmm" in base else "dot" if base == "dot" else "addmm_cuda"
        message = f"\"{kernel}\" not implemented for '{scalar_name(one.dtype)}'"
        _tell("backend-unsupported", message, plan, args, NotImplementedError)
        return payloads
    if "bmm" in base:
        message = f"expected scalar type {scalar_name(one.dtype)} but found {scalar_name(two.dtype)}"
    else:
        names = f"{scalar_name(one.dtype)} and {scalar_name(two.dtype)}"
        message = f"mat1 and mat2 must have the same dtype, but got {names}"
    _tell("dtype-mismatch", message, plan, args, RuntimeError)
    # Repaired: the narrower type is what the rest of the network most likely has, its layers or its activations.
    wanted = two.dtype if two.dtype in half_kernels.HALF and one.dtype not in half_kernels.HALF else one.dtype
    return [p.to(wanted) if isinstance(p, Tensor) else p for p in payloads]


def unscale(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """GradScaler's kernel has no bfloat16 and no complex numbers on CUDA."""
    odd = next((g.dtype for g in payloads[0] if g.dtype is torch.bfloat16 or g.is_complex()), None)
    if odd is not None:
        kind = "ComplexFloat" if odd.is_complex else "BFloat16"
        message = f"\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for '{kind}'"
        _tell("scaler-misuse", message, plan, args, NotImplementedError)
    return payloads


def packing(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """The lengths of a packed sequence are read on the host."""
    lengths = args[1]
    if isinstance(lengths, Tensor) and lengths.is_cuda:
        message = (
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {scalar_name(lengths.dtype)} tensor"
        )
        faults.report(
            "device-mismatch", message, plan.name.replace("::", "."), [("lengths", lengths)], RuntimeError
        )
    return payloads


def host_only(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """CUDA has no kernel for these."""
    full = f"{plan.name}.{plan.overload}" if plan.overload else plan.name
    message = f"Could not run '{full}' with arguments from the 'CUDA' backend."
    _tell("backend-unsupported", message, plan, args, NotImplementedError)
    return payloads


_HOST_ONLY = words(
    "histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors to_mkldnn"
)
BEFORE: dict[str, Before] = {
    **{f"aten::{name}": _product(left) for name, left in _PRODUCTS.items()},
    **{f"aten::{name}": host_only for name in _HOST_ONLY},
    "aten::_amp_foreach_non_finite_check_and_unscale_": unscale,
    "aten::_pack_padded_sequence": packing,
    "aten::_fused_sdp_choice": sdp_attention.refuse_below,
    **determinism.BEFORE,
    **float8.BEFORE,
    **half_kernels.BEFORE,
}


_SUBSTITUTES = batch_norm.SUBSTITUTES | sdp_kernels.SUBSTITUTES | sdp_packed.SUBSTITUTES


def _tell(kind: str, message: str, plan: Plan, args: Args, raises: type[Exception]) -> None:
    named = [(n, v) for n, v in zip(plan.names, args, strict=False) if isinstance(v, Tensor)]
    faults.report(kind, message, plan.name.replace("::", "."), named, raises)


def with_tensors(func: Any, payloads: Any, error: RuntimeError) -> list[Any]:
    """A traced constant reaches us as a number where the operation wants a tensor: the arguments as they were."""
    numbers = [
        str(argument.type) == "Tensor" and value.__class__ in (int, float, bool)
        for argument, value in zip(func._schema.arguments, payloads, strict=False)
    ]
    if not any(numbers) or "Expected a value of type 'Tensor'" not in str(error):
        raise error
    return [torch.tensor(value) if number else value for number, value in zip(numbers, payloads, strict=True)]


def rescue(plan: Plan, func: Any, args: Args, payloads: list[Any], named: Kwargs, error: Exception) -> Any:
    """A CPU kernel refused. CUDA's kernel would not have (compute in a wider type), or says so otherwise."""
    text = str(error)
    if plan.name == "aten::_fused_sdp_choice":
        return sdp_attention.choose_below(*payloads, **named)
    memory.refuse_on_small_host(error)
    base = plan.name.removeprefix("aten::")
    if _UNSUPPORTED.search(text):
        return _widened(plan, func, payloads, named, _HALVES)
    if base == "histc" and "not implemented for" in text:
        return _widened(plan, func, payloads, named, _COUNTED)
    if base == "equal" and "not implemented for 'Float8" in text:
        return bool(torch.equal(*(value.float() for value in payloads)))
    if base == "_scaled_mm":
        return float8.widened(*payloads, **named)
    if base in _PRODUCTS and func._overloadname in ("dtype", "dtype_out"):
        return _wide_product(func, payloads, named)
    if (
        isinstance(error, NotImplementedError)
        and text.startswith("Could not run ")
        and "'CPU' backend" in text
    ):
        if base in _SUBSTITUTES:
            return _SUBSTITUTES[base](*payloads, **named)
        raise state.NotSimulated(f"{plan.name} has no kernel on the CPU: virtual GPUs lack it.") from error
    if base in _ASSERTING and (
        "out of range" in text or "out of bounds" in text or "not in the valid range" in text
    ):
        asserted = runtime_error("device-side assert triggered")
        raise AcceleratorError(f"{asserted}(on the CPU: {text})") from error
    if "Expected a value of type 'Tensor'" in text and isinstance(error, RuntimeError):
        return func(*with_tensors(func, payloads, error), **named)
    if "type (torch." in text:
        raise type(error)(text.replace("(torch.", "(torch.cuda.")) from None
    raise error


def _widened(
    plan: Plan, func: Any, payloads: list[Any], named: Kwargs, wider: dict[torch.dtype, torch.dtype]
) -> Any:
    """Compute in a type that the CPU's kernel takes, and give the result in the type that was asked for."""
    there = [getattr(value, "dtype", value) for value in tree_leaves((payloads, named))]
    # Two narrow types are computed in one wide type: its results go back to the one that is there.
    narrower = {wide: narrow for narrow, wide in wider.items()}
    narrower |= {wide: narrow for narrow, wide in wider.items() if narrow in there}

    def up(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(wider.get(value.dtype, value.dtype))
        return wider.get(value, value) if isinstance(value, torch.dtype) else value

    def down(value: Any) -> Any:
        return value.to(narrower.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value

    raised, raised_named = tree_map(up, (payloads, named))
    out = func(*raised, **raised_named)
    for name in plan.writes:
        at = plan.names.index(name)
        before, after = (
            (payloads[at], raised[at]) if at < len(payloads) else (named[name], raised_named[name])
        )
        for old, new in zip(before, after, strict=True) if isinstance(before, list) else ((before, after),):
            if old is not new:
                old.copy_(new)
    return (
        payloads[0] if plan.writes and isinstance(out, Tensor) and out is raised[0] else tree_map(down, out)
    )


def _wide_product(func: Any, payloads: list[Any], named: Kwargs) -> Any:
    """`torch.mm(a, b, out_dtype=torch.float32)` of 16-bit operands, which only CUDA has."""
    dtype = next(value for value in (*payloads, *named.values()) if isinstance(value, torch.dtype))
    operands = [value.to(dtype) for value in payloads if isinstance(value, Tensor)]
    scales = {name: named[name] for name in ("alpha", "beta") if name in named}
    made = func.overloadpacket.default(*operands, **scales)
    out = named.get("out")
    return made if out is None else out.copy_(made)
