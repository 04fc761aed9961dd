"""What CUDA's kernels refuse in 16 bits and the CPU's take, or only seem to lack: CTC, small cdist, transforms, norms.

Which these are is read from torch's own table of what its operations support (`torch.testing`, `dtypesIfCUDA`) and from
the kernels' sources. An operation that CUDA has in 16 bits and the CPU lacks is not here: see kernels.rescue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import determinism, faults
from trimtab.virtual.plans import Args, Plan
from trimtab.virtual.wording import scalar_name

HALF = (torch.float16, torch.bfloat16)
_MATRIX_AT = 25
"""From more rows than this on, distances are computed by a matrix product, which has 16 bits."""
_NORMS = ("layer_norm", "group_norm")
_KERNELS = {
    "_ctc_loss": "ctc_loss_cuda",
    "_pdist_forward": "pdist_cuda",
    "igamma": "igamma_cuda",
    "igammac": "igammac_cuda",
    "cholesky": "cholesky_cusolver",
    "cholesky_inverse": "cholesky_inverse_cuda",
    "_cholesky_solve_helper": "cholesky_solve_cuda",
    "triangular_solve": "triangular_solve_cuda",
    "geqrf": "geqrf_cuda",
    "ormqr": "ormqr_cuda",
    "lu_unpack": "lu_unpack_cuda",
}


def _refuse(kind: str, message: str, plan: Plan, args: Args, raises: type[Exception]) -> None:
    operands = [(n, v) for n, v in zip(plan.names, args, strict=False) if isinstance(v, Tensor)]
    faults.report(kind, message, plan.name.replace("::", "."), operands, raises)


def _no_kernel(kernel: str, plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    dtype = payloads[0].dtype
    if dtype in HALF:
        message = f"\"{kernel}\" not implemented for '{scalar_name(dtype)}'"
        _refuse("backend-unsupported", message, plan, args, NotImplementedError)
    return payloads


def kernel(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """An operation without a kernel for 16 bits."""
    return _no_kernel(_KERNELS[plan.name.removeprefix("aten::")], plan, payloads, args)


def distances(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """cdist of few rows, or of another norm than the Euclidean one."""
    one, two, p, mode = payloads[:4]
    many = max(one.size(-2), two.size(-2)) > _MATRIX_AT
    if p == 2 and (mode == 1 or (mode in (0, None) and many)):
        return payloads
    return _no_kernel("cdist_cuda", plan, payloads, args)


def histogram(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """histc, which also adds atomically."""
    if payloads[0].dtype is torch.float16:
        _refuse("backend-unsupported", "HalfTensor is not supported", plan, args, RuntimeError)
        return payloads
    return determinism.check(plan, _no_kernel("histc", plan, payloads, args), args)


def norm(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """Layer and group norm read weight and bias in the input's own type; the CPU's take wider ones."""
    given = dict(zip(plan.names, payloads, strict=False))
    wanted = given["input"].dtype
    weights = [v for n in ("weight", "bias") if isinstance(v := given.get(n), Tensor)]
    odd = next((v for v in weights if v.dtype is not wanted), None)
    if odd is None:
        return payloads
    # Their gradients only repeat what was told in the forward pass.
    if not plan.name.endswith("_backward"):
        message = f"expected scalar type {scalar_name(wanted)} but found {scalar_name(odd.dtype)}"
        _refuse("dtype-mismatch", message, plan, args, RuntimeError)
    return [v.to(wanted) if any(v is weight for weight in weights) else v for v in payloads]


def transform(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """cuFFT in 16 bits knows sizes that are powers of two alone. (Others are computed in 32 bits: kernels.rescue.)"""
    given, dims, _, last = payloads[:4]
    if given.dtype in (torch.float16, torch.complex32):
        sizes = [given.size(d) for d in dims]
        if plan.name == "aten::_fft_c2r":
            sizes[-1] = int(last)
        if any(size & (size - 1) for size in sizes):
            message = (
                "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but "
                f"got a signal size of{sizes}"
            )
            _refuse("backend-unsupported", message, plan, args, RuntimeError)
    return payloads


BEFORE: dict[str, Callable[[Plan, list[Any], Args], list[Any]]] = {
    **{f"aten::{name}": kernel for name in _KERNELS},
    "aten::_cdist_forward": distances,
    "aten::histc": histogram,
    **{f"aten::native_{name}{end}": norm for name in _NORMS for end in ("", "_backward")},
    **{f"aten::_fft_{name}": transform for name in ("r2c", "c2r", "c2c")},
}
