"""What CUDA refuses under `torch.use_deterministic_algorithms(True)`: kernels that add atomically.

Those, and the words, are what an H200 said (torch 2.11). A kernel of which nobody has seen it is not refused here.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from trimtab.virtual import faults
from trimtab.virtual.plans import Args, Plan

# The operation, and the name by which its kernel speaks of itself.
_ATOMIC = {
    "median": "median CUDA with indices output",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "max_pool3d_with_indices_backward": "max_pool3d_with_indices_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "max_unpool2d": "max_unpooling2d_forward_out",
    "histc": "_histc_cuda with floating point input",
    "bincount": "_bincount_cuda",
    "put_": "put_",
}
_SAYS = " does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True"
_REFUSED = (
    ")'. You can turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's "
    "acceptable for your application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help "
    "us prioritize adding deterministic support for this operation."
)
_WARNED = (
    ", warn_only=True)'. You can file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize "
    "adding deterministic support for this operation."
)


def _is_exact(plan: Plan, payloads: list[Any]) -> bool:
    """Some kernels add atomically for some of their arguments only."""
    given = dict(zip(plan.names, payloads, strict=False))
    if plan.name == "aten::histc":
        return not given["self"].is_floating_point()
    if plan.name == "aten::bincount":
        return not isinstance(given.get("weights"), Tensor)
    if plan.name == "aten::put_":
        return bool(given.get("accumulate"))
    return plan.name == "aten::median" and plan.overload == ""


def check(plan: Plan, payloads: list[Any], args: Args) -> list[Any]:
    """Say what CUDA says of such an operation where a program asked for determinism."""
    if torch.are_deterministic_algorithms_enabled() and not _is_exact(plan, payloads):
        kernel = _ATOMIC[plan.name.removeprefix("aten::")]
        if torch.is_deterministic_algorithms_warn_only_enabled():
            warnings.warn(kernel + _SAYS + _WARNED, stacklevel=2)
        else:
            operands = [(n, v) for n, v in zip(plan.names, args, strict=False) if isinstance(v, Tensor)]
            op = plan.name.replace("::", ".")
            faults.report("backend-unsupported", kernel + _SAYS + _REFUSED, op, operands, RuntimeError)
    return payloads


BEFORE = {f"aten::{name}": check for name in _ATOMIC}
