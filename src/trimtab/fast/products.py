"""`onto`: a product added to the adapter's product by the matrix library itself, `x @ w + t @ b` in one result.

The small product is written first and the large one accumulates onto it: its kernel reads what is there while it
computes, so that the sum costs no pass of its own. One operation for a compiler, which would otherwise part them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

# Defined by hand: what `custom_op` puts around an operation takes longer than launching it.
_LIBRARY = torch.library.Library("trimtab", "FRAGMENT")
_LIBRARY.define("onto(Tensor x, Tensor w, Tensor t, Tensor b) -> Tensor")


@torch.library.impl(_LIBRARY, "onto", "CompositeExplicitAutograd")
def _onto(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        # Here the sum finds what the large product wrote in the cache.
        return torch.mm(x, w).addmm_(t, b)
    return torch.mm(t, b).addmm_(x, w)


def _shaped(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


torch.library.register_fake("trimtab::onto", _shaped, lib=_LIBRARY)
onto = torch.ops.trimtab.onto.default
"""`onto(x, w, t, b)`; x: [rows, in], w: [in, out], t: [rows, rank], b: [rank, out]."""


@register_flop_formula(torch.ops.trimtab.onto)
def _flops(x: Any, w: Any, t: Any, b: Any, *, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * x[0] * x[1] * w[1] + 2 * t[0] * t[1] * b[1])
