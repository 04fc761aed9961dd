"""Recurrent layers as cuDNN runs them: a pass in eval mode keeps nothing to go back with, so that backward refuses.

The CPU's kernels do not know the difference; the values are theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual.functions import Handler, call
from trimtab.virtual.tensor import VIRTUAL

_TRAIN = 3
"""How far behind `has_biases`, the first flag in every form of the call, the mode stands."""


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = call(func, args, kwargs)
    flag = next((index for index, value in enumerate(args) if value.__class__ is bool), None)
    if flag is None or args[flag + _TRAIN : flag + _TRAIN + 1] != (False,) or not torch.is_grad_enabled():
        return result
    if args[0].__class__ in VIRTUAL and torch.backends.cudnn.enabled:
        for made in result:
            if made.requires_grad:
                made.register_hook(_refuse)
    return result


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError("cudnn RNN backward can only be called in training mode")


HANDLERS: dict[Any, Handler] = {
    getattr(torch, name): _run for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
