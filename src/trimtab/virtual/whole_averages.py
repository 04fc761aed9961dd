"""ReduceOp.AVG of whole numbers: NCCL adds them up and divides by the ranks towards nought; gloo, in whose place it
stands here, refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trimtab.virtual import met_ranks


def as_nccl(real: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of a process group, whose first argument is what it writes, with the averages that NCCL has."""

    @functools.wraps(real)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        options = next((one for one in (*args, *kwargs.values()) if hasattr(one, "reduceOp")), None)
        written = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
        if (
            options is None
            or options.reduceOp != dist.ReduceOp.AVG
            or not written
            or not all(map(_whole, written))
        ):
            return real(group, *args, **kwargs)
        options.reduceOp = dist.ReduceOp.SUM
        real(group, *args, **kwargs).wait()
        options.reduceOp = dist.ReduceOp.AVG
        if group.rank() == getattr(options, "rootRank", group.rank()):
            for tensor in written:
                tensor.copy_(torch.div(tensor, group.size(), rounding_mode="trunc"))
        # To wait for gloo's own once more could write the sum again.
        return dist.Work.unbox(met_ranks.done(written))

    return collective


def _whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
