"""The memory of a result where it is not simply its own.

Where autograd works in place on hardware, and not on a tensor class such as the virtual one, the result takes over the
memory of an operand that nobody else holds.
Gradients that meet are added into one of them; the gradient of an indexed tensor is written into fresh zeros; a linear
layer adds its bias to the product. Some results keep more memory than they need.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch.nn.functional import linear

from trimtab.virtual import functions
from trimtab.virtual.memory import Block
from trimtab.virtual.plans import Args
from trimtab.virtual.tensor import VIRTUAL

_task, _NONE = torch._C._current_graph_task_id, -1
"""Which backward pass is under way: asked at every sum of two tensors."""
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_OWN = __name__.rpartition(".")[0]


def _by_engine() -> bool:
    """Whether autograd's engine itself, and no Python of a program, called the operation."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        if frame.f_code is _ENGINE:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _alone(tensor: Any, holders: int) -> Block | None:
    """The memory of a dense tensor that nobody holds but the call itself, by so many references in C++."""
    count: Any = getattr(tensor, "_use_count", None)
    if tensor.__class__ not in VIRTUAL or count is None or count() > holders:
        return None
    block: Block = tensor._block
    dense = tensor.numel() * tensor.element_size() >= block.nbytes - 511
    return block if dense and sys.getrefcount(block) == 3 else None  # the tensor, this name, the question


class _Layer(threading.local):
    """Whether a linear layer is at work that adds its bias behind its product, as it does where no kernel does both."""

    adds = False


_layer = _Layer()


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if bias is None or x.dim() == 2 or x.is_contiguous():
        return functions.call(func, args, kwargs)
    _layer.adds = True
    try:
        return functions.call(func, args, kwargs)
    finally:
        _layer.adds = False


functions.HANDLERS[linear] = _linear


def _sum(args: Args) -> Block | None:
    one, two = args[:2]
    if _layer.adds and one.__class__ in VIRTUAL and one.shape[-1:] == two.shape and one.dtype is two.dtype:
        return one._block  # the product, of which nobody else knows
    if (
        _task() == _NONE
        or two.__class__ not in VIRTUAL
        or one.shape != two.shape
        or one.dtype is not two.dtype
    ):
        return None
    return (_alone(one, 4) or _alone(two, 4)) if _by_engine() else None


def _written(args: Args) -> Block | None:
    return _alone(args[0], 5) if _task() != _NONE and _by_engine() else None


def _whole(args: Args) -> Block | None:
    """A loss over all elements lies in the memory that their losses would have taken."""
    source = args[0]
    if (args[2] if len(args) > 2 else 1) == 0 or source.__class__ not in VIRTUAL:
        return None
    return Block(source._slot, source.numel() * source.element_size())


_WRITTEN = ("aten::index_put", "aten::index_add", "aten::scatter", "aten::scatter_add")
_LOSSES = ("aten::mse_loss", "aten::smooth_l1_loss")
RULES = {
    "aten::add": _sum,
    **dict.fromkeys(_WRITTEN, _written),
    **dict.fromkeys(_LOSSES, _whole),
}
