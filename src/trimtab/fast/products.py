"""`onto`: a product added to the adapter's product by the matrix library itself, `x @ w + t @ b` in one result.

The small product is written first and the large one accumulates onto it: its kernel reads what is there while it
computes, so that the sum costs no pass of its own. One operation for a compiler, which would otherwise part them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def onto(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """x: [rows, in], w: [in, out], t: [rows, rank], b: [rank, out]."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.mm(t, b).addmm_(x, w)  # nobody parts them here, and an operation of our own costs a call
    told: torch.Tensor = _onto(x, w, t, b)
    return told


@torch.library.custom_op("trimtab::onto", mutates_args=())
def _onto(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(t, b).addmm_(x, w)


@_onto.register_fake
def _(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@register_flop_formula(torch.ops.trimtab.onto)
def _flops(x: Any, w: Any, t: Any, b: Any, *, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * x[0] * x[1] * w[1] + 2 * t[0] * t[1] * b[1])
