"""Recurrent layers as cuDNN runs them: a pass in eval mode keeps nothing to go back with, so that backward refuses.

The CPU's kernels do not know the difference; the values are theirs. Without values a layer is the one operation that
cuDNN makes of it, whatever its length: the result, and for the way back one piece of memory that only cuDNN reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual.functions import Handler, call
from trimtab.virtual.tensor import VIRTUAL
from trimtab.virtual.unknown import forget, is_unknown

_TRAIN = 3
"""How far behind `has_biases`, the first flag in every form of the call, the mode stands."""


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    flag = next((index for index, value in enumerate(args) if value.__class__ is bool), None)
    if flag is not None and is_unknown(args[0]) and args[0].is_cuda and torch.backends.cudnn.enabled:
        return _as_one_operation(func, args, flag)
    result = call(func, args, kwargs)
    if flag is None or args[flag + _TRAIN : flag + _TRAIN + 1] != (False,) or not torch.is_grad_enabled():
        return result
    if args[0].__class__ in VIRTUAL and torch.backends.cudnn.enabled:
        for made in result:
            if made.requires_grad:
                made.register_hook(_refuse)
    return result


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError("cudnn RNN backward can only be called in training mode")


def _as_one_operation(func: Any, args: tuple[Any, ...], flag: int) -> Any:
    """The results of a layer whose input has no values."""
    source, states, weights = args[0], args[flag - 2], args[flag - 1]
    layers, train, ways = args[flag + 1], args[flag + _TRAIN], 2 if args[flag + 4] else 1
    batch_first = len(args) > flag + 5 and args[flag + 5]
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    kind = getattr(func, "__name__", "")
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        source, states = source.to(dtype), [state.to(dtype) for state in states]
        weights = [weight.to(dtype) for weight in weights]
    given = source.transpose(0, 1) if batch_first else source
    keeps = train and torch.is_grad_enabled()
    made = _Layer.apply((kind, layers * ways, ways, keeps), given, len(states), *states, *weights)
    out = made[0].transpose(0, 1) if batch_first else made[0]
    return (out, *made[1:])


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: tuple[str, int, int, bool], source: Tensor, number: int, *rest: Tensor
    ) -> Any:
        kind, layers, ways, keeps = form
        states, weights = rest[:number], rest[number:]
        given = source.contiguous()
        hidden = states[0].size(-1)
        out = given.new_empty((*given.shape[:-1], hidden * ways))
        ends = [torch.empty_like(state) for state in states]
        ctx.reserve = None
        if keeps:
            steps = given.numel() // given.size(-1)
            between = layers - ways  # the results of all layers but the last
            size = steps * hidden * (layers * _KEPT[kind] + between) * given.element_size()
            ctx.reserve = torch.empty(size, dtype=torch.uint8, device=given.device)
        ctx.train = keeps
        ctx.save_for_backward(given, out, *states, *weights)
        for tensor in (out, *ends):
            forget(tensor)
        return (out, *ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.train:
            _refuse(grads[0])
        given, _, *rest = ctx.saved_tensors
        number = len(grads) - 1
        wanted = [*rest[:number], *rest[number:]]
        made = [torch.empty_like(tensor) for tensor in (given, *wanted)]
        ctx.reserve = None
        for tensor in made:
            forget(tensor)
        return (None, made[0], None, *made[1:])


_KEPT = {"lstm": 5, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers that are kept for each step, row and unit of a layer: its gates, and an LSTM's cell or what a GRU's last gate
resets. That of the LSTM is inferred from one peak on an H200; the others follow from how these layers are defined."""

HANDLERS: dict[Any, Handler] = {
    getattr(torch, name): _run for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
