"""Recurrent layers as cuDNN runs them: a pass in eval mode keeps nothing to go back with, so that backward refuses.

The CPU's kernels do not know the difference; the values are theirs. Without values a layer is the one operation that
cuDNN makes of it, whatever its length: the result, and for the way back one piece of memory that only cuDNN reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
    cast = torch.is_autocast_enabled("cuda")
    if cast:
        dtype = torch.get_autocast_dtype("cuda")
        source, states = source.to(dtype), [state.to(dtype) for state in states]
        weights = [weight.to(dtype) for weight in weights]
    given = source.transpose(0, 1) if batch_first else source
    keeps = train and torch.is_grad_enabled()
    # `flatten_parameters` leaves weights of bfloat16 apart; those that autocast made lie in one piece.
    apart = source.dtype is torch.bfloat16 and not cast
    longest = args[1].numel() if source.dim() == 2 else 0  # of packed rows how many go on at each step
    form = _Form(kind, layers, ways, train, keeps, args[flag + 2] > 0, apart, longest)
    made = _Layer.apply(form, given, len(states), *states, *weights)
    out = made[0].transpose(0, 1) if batch_first else made[0]
    return (out, *made[1:])


class _Form(NamedTuple):
    """What a layer is, apart from its sizes."""

    kind: str
    layers: int
    ways: int
    train: bool
    keeps: bool
    drops: bool
    apart: bool
    """Whether the weights do not lie in one piece, so that each pass makes a copy that does."""
    longest: int
    """Steps of the longest of packed rows; 0 where rows are not packed."""

    def reserve(self, given: Tensor, state: Tensor) -> int:
        """Bytes for the way back: what each step keeps, the results of all layers but the last, what was dropped.

        What was dropped is noted of packed rows as if all were as long as the longest.
        """
        hidden = state.size(-1)
        numbers = given.numel() // max(given.size(-1), 1) * hidden
        noted = self.longest * state.size(1) * hidden or numbers
        between = (self.layers - 1) * self.ways
        kept = numbers * (self.layers * self.ways * _KEPT[self.kind] + between) * given.element_size()
        return kept + (noted * between * self.ways // 8 if self.drops else 0) + 256

    def workspace(self, given: Tensor, state: Tensor, weights: int) -> int:
        """Bytes while it runs, either way: gates, a result and an input of all steps, and the weights once more."""
        hidden, batch = state.size(-1), state.size(1)
        size, width = given.element_size(), given.size(-1)
        steps = given.numel() // max(width, 1)
        gates = _GATES[self.kind]
        result = steps * hidden * self.ways * size
        if self.longest:
            # Step by step, as many rows as still go on.
            results = gates + (2 if self.ways == 2 else self.train and self.drops)
            states = _PACKED_STATES[self.kind] + (2 if self.ways == 2 else 0)
            states += 8 if self.train and self.kind.startswith("rnn") else 0
            each = _EACH + states * batch * hidden * size
            return results * result + weights + each * self.layers * self.ways + 256
        widest = max(width, hidden * self.ways if self.layers > 1 else 0)
        lone = self.kind == "lstm" and self.layers * self.ways == 1 and given.dtype is torch.float16
        whole = _LONE * result if lone else (gates + 1) * result
        if self.ways == 2 or (self.train and (self.drops or self.kind != "lstm")):
            whole += result
        if width > hidden and (self.ways == 2 or self.train) and not lone:
            whole += steps * width * size
        each = _EACH + _STATES * batch * hidden * size
        return whole + steps * widest * size + weights + each * self.layers * self.ways


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, source: Tensor, number: int, *rest: Tensor) -> Any:
        states, weights = rest[:number], rest[number:]
        given = source.contiguous()
        state = states[-1]  # of an LSTM that projects its results the cell's, which its gates have
        out = given.new_empty((*given.shape[:-1], states[0].size(-1) * form.ways))
        ends = [torch.empty_like(state) for state in states]
        matrices = sum(weight.numel() for weight in weights if weight.dim() > 1) * given.element_size()
        ctx.workspace = form.workspace(given, state, matrices)
        joined = given.new_empty(sum(weight.numel() for weight in weights) if form.apart else 0)
        working = _bytes(ctx.workspace, given)
        reserve = (joined, _bytes(form.reserve(given, state), given)) if form.keeps else ()
        del working, joined
        ctx.train, ctx.weights = form.keeps, len(weights)
        ctx.save_for_backward(given, out, *states, *weights, *reserve)
        for tensor in (out, *ends):
            forget(tensor)
        return (out, *ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.train:
            _refuse(grads[0])
        given, _, *rest = ctx.saved_tensors
        number = len(grads) - 1
        made = [torch.empty_like(tensor) for tensor in (given, *rest[:number])]
        _bytes(ctx.workspace, given)
        # One piece of memory for all of them, as they lie in the layer.
        weights = rest[number : number + ctx.weights]
        sizes = [weight.numel() for weight in weights]
        parts = given.new_empty(sum(sizes)).split(sizes)
        made += [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        _bytes(ctx.workspace, given)
        for tensor in made:
            forget(tensor)
        return (None, made[0], None, *made[1:])


def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.gru_cell and torch.lstm_cell: on CUDA one kernel behind two products."""
    names = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
    given = dict(zip(names, args, strict=False)) | kwargs
    source, states = given["input"], given["hx"]
    states = [*states] if isinstance(states, (list, tuple)) else [states]
    operands = source, *states, given["w_ih"], given["w_hh"]
    if not (source.is_cuda and any(map(is_unknown, operands))):
        return call(func, args, kwargs)
    gates = nn.functional.linear(source, given["w_ih"])
    hidden = nn.functional.linear(states[0], given["w_hh"])
    biases = [given.get(name) for name in names[4:]]
    state = states[-1].to(gates.dtype)  # under autocast
    made = _Cell.apply(func.__name__, gates, hidden, state, *biases)
    return made if len(states) > 1 else made[0]


class _Cell(torch.autograd.Function):
    """One step. For the way back it keeps what it was given beside what its kernel notes, as ATen's formula does."""

    @staticmethod
    def forward(ctx: Any, kind: str, gates: Tensor, hidden: Tensor, state: Tensor, *biases: Any) -> Any:
        noted = _NOTED[kind] * state.size(-1)
        workspace = state.new_empty(state.size(0), noted)
        made = [torch.empty_like(state) for _ in range(2 if kind == "lstm_cell" else 1)]
        ctx.kind, ctx.biased = kind, biases[0] is not None
        ctx.save_for_backward(gates, hidden, state, *made[1:], workspace)
        for tensor in made:
            forget(tensor)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gates, _, state, *_ = ctx.saved_tensors
        first = torch.empty_like(gates)
        # An LSTM's gates have one gradient, whichever side they are from.
        second = first if ctx.kind == "lstm_cell" else torch.empty_like(gates)
        back = torch.empty_like(state)
        biases: list[Tensor | None] = [None, None]
        if ctx.biased:
            one = first.sum(0)
            biases = [one, one if second is first else second.sum(0)]
        for tensor in (first, second, back, *biases):
            if tensor is not None:
                forget(tensor)
        return (None, first, second, back, *biases)


_NOTED = {"gru_cell": 5, "lstm_cell": 4}
"""Numbers that the kernel notes for each row and unit."""


def _bytes(number: int, like: Tensor) -> Tensor:
    return torch.empty(number, dtype=torch.uint8, device=like.device)


_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers that are kept for each step, row and unit of a layer. These and the workspaces are what 135 cases on an H200
take (benchmarks/cudnn_memory.py); no source tells them."""
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_LONE = 21
"""Numbers for each step, row and unit in the kernel that fp16 has for one layer of an LSTM."""
_EACH = 8 << 20
"""For each layer and way."""
_STATES = 10
"""States of all rows, for each layer and way."""
_PACKED_STATES = {"lstm": 6, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""The same where rows are packed."""

HANDLERS: dict[Any, Handler] = {
    **{getattr(torch, name): _run for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{getattr(torch, name): _step for name in _NOTED},
}
