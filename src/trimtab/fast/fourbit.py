"""Four-bit base weights in a fast step: each is unpacked by one launch, where Triton can do it.

The layers themselves (`models/nf4_linear.py`) make their product in one operation each way and keep nothing unpacked;
fused adapters and compiled blocks go over them as over any frozen layer. Elsewhere plain torch unpacks them.
"""

from __future__ import annotations

import torch
from torch import nn

from trimtab.fast.kernels import usable_on
from trimtab.models.nf4 import Packed
from trimtab.models.nf4_linear import Nf4Linear, unpack_by


def use_fast_fourbit(model: nn.Module) -> int:
    """Let the model's packed weights be unpacked by the kernel; returns how many layers that is, 0 where it cannot."""
    layers = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    count = sum(usable_on(layer.weight) for layer in layers)
    if count:
        unpack_by(_by_kernel)
    return count


def _by_kernel(packed: Packed, dtype: torch.dtype) -> torch.Tensor | None:
    if not usable_on(packed.codes):
        return None
    from trimtab.fast.kernels.nf4 import unpack

    return unpack(packed, dtype)
