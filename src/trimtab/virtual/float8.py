"""Eight-bit floating-point numbers: what CUDA's kernels refuse that the CPU's take, and the products of H100 and later.

Seen on an H200 (torch 2.11). Values are the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import faults
from trimtab.virtual.plans import Args, Plan
from trimtab.virtual.state import NotSimulated
from trimtab.virtual.wording import scalar_name

TYPES = frozenset(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)
_WIDE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SCALING = (
    "Invalid scaling configuration.\n- For TensorWise scaling, a and b should be float8, scales should be float and "
    "singletons.\n- For RowWise scaling, a and b should be float8, scales should be float, scale_a should be (m, 1) "
    "and scale_b should be (1, n), and both should be contiguous."
)


def absolute(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """abs, and isinf that is made of it."""
    if payloads[0].dtype in TYPES:
        _refuse(
            plan,
            args,
            f"\"abs_cuda\" not implemented for '{scalar_name(payloads[0].dtype)}'",
            NotImplementedError,
        )
    return payloads


def scaled_product(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """_scaled_mm: an H100's layouts, sizes and scales."""
    one, two, scale_one, scale_two = payloads[:4]
    capability = args[0]._slot.capability
    if capability < (8, 9):
        message = (
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm "
            "MI300+"
        )
        _refuse(plan, args, message, RuntimeError)
        return payloads
    if {one.dtype, two.dtype} & _WIDE or {scale_one.dtype, scale_two.dtype} & (_WIDE - {torch.float32}):
        _refuse(plan, args, _SCALING, RuntimeError)
        return payloads
    rows = tuple(scale_one.shape) == (one.size(0), 1) and tuple(scale_two.shape) == (1, two.size(1))
    if not rows and not scale_one.numel() == scale_two.numel() == 1:
        raise NotSimulated("torch._scaled_mm with a scale for each block is not simulated by virtual GPUs.")
    if one.size(1) % 16:
        shape = f"({one.size(0)}x{one.size(1)})"
        message = f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: {shape}."
        _refuse(plan, args, message, RuntimeError)
    elif two.size(0) % 16 or two.size(1) % 16:
        message = f"mat2 shape ({two.size(0)}x{two.size(1)}) must be divisible by 16"
        _refuse(plan, args, message, RuntimeError)
    elif one.dtype is two.dtype is torch.float8_e5m2:
        _refuse(plan, args, "Multiplication of two Float8_e5m2 matrices is not supported", ValueError)
    elif one.stride(1) != 1 or two.stride(0) != 1:
        message = "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
        _refuse(plan, args, message, RuntimeError)
    return payloads


def widened(
    one: Tensor,
    two: Tensor,
    scale_one: Tensor,
    scale_two: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """_scaled_mm in float32, where the CPU's kernel takes fewer scales or types than CUDA's."""
    made = (one.float() @ two.float()) * scale_one * scale_two
    if bias is not None:
        made = made + bias.float()
    kind = out_dtype or (one.dtype if out is None else out.dtype)
    if kind in TYPES:
        bound = torch.finfo(kind).max
        made = (made if scale_result is None else made * scale_result).clamp(-bound, bound)
    return made.to(kind) if out is None else out.copy_(made.to(kind))


def _refuse(plan: Plan, args: Args, message: str, raises: type[Exception]) -> None:
    named = [(n, v) for n, v in zip(plan.names, args, strict=False) if isinstance(v, Tensor)]
    faults.report("backend-unsupported", message, plan.name.replace("::", "."), named, raises)


BEFORE = {"aten::abs": absolute, "aten::isinf": absolute, "aten::_scaled_mm": scaled_product}
