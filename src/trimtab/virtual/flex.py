"""flex_attention, with gradients and under torch.compile: torch's own definition of it, on virtual tensors.

torch would compile it, or trace it for its gradients; here it is computed as it is defined, operation by operation,
with the whole matrix of scores in memory (as on hardware without torch.compile). Never a block-sparse kernel.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import flex_attention

from trimtab.virtual import functions

# The package has the operation under the name of its module.
_MODULE: Any = sys.modules["torch._higher_order_ops.flex_attention"]


def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The higher-order operation under torch.nn.attention.flex_attention."""
    if torch.is_autocast_enabled("cuda") and args[0].is_cuda:
        dtype = torch.get_autocast_dtype("cuda")
        args = (*(value.to(dtype) if isinstance(value, Tensor) else value for value in args[:3]), *args[3:])
    with functions.switched_on():
        return _MODULE.math_attention(*args, **kwargs)


HANDLERS: dict[Any, functions.Handler] = {flex_attention: attend}
