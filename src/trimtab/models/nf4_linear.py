"""A frozen linear layer whose weight is held in NF4, and its product as an operation of torch.

The weight is made in the activations' number format where a product needs it, in the forward pass and again in the
backward pass, and let go: nothing unpacked is ever kept. The product is one opaque operation each way, so that a
compiler can neither save the unpacked weight nor make one of the two unpackings. It never trains the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.models.nf4 import Packed, pack, sizes, unpack

Unpack = Callable[[Packed, torch.dtype], torch.Tensor | None]
_unpackers: list[Unpack] = []


def unpack_by(faster: Unpack) -> None:
    """From now on weights are unpacked by this where it gives one; None leaves it to plain torch."""
    if faster not in _unpackers:
        _unpackers.append(faster)


def _weight(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    for faster in _unpackers:
        made = faster(packed, dtype)
        if made is not None:
            return made
    return unpack(packed, dtype)


@torch.library.custom_op("trimtab::nf4_linear", mutates_args=())
def nf4_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """`x @ weight.T`, of any number of leading dimensions."""
    weight = _weight(Packed(codes, scales, groups), x.dtype)
    return F.linear(x, weight)


@nf4_linear.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@torch.library.custom_op("trimtab::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(
    grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """The gradient of what `nf4_linear` was given: `grad @ weight`."""
    return grad @ _weight(Packed(codes, scales, groups), grad.dtype)


@nf4_linear_backward.register_fake
def _(grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(*grad.shape[:-1], codes.shape[1] * 2)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return nf4_linear_backward(grad, *ctx.saved_tensors), None, None, None


nf4_linear.register_autograd(_gradients, setup_context=_keep)


class Nf4Linear(nn.Linear):
    """Takes the place of a linear layer. Its `weight` is the packed codes, beside which its scales lie."""

    def __init__(self, layer: nn.Linear, packed: Packed | None = None) -> None:
        """In place of `layer`, with its bias. Without `packed` it is empty, to be filled by whoever reads the files."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        if packed is None:
            kinds = (torch.uint8, torch.uint8, torch.int32)
            shapes = sizes(self.out_features, self.in_features)
            where = layer.weight.device
            packed = Packed(
                *(torch.empty(s, dtype=k, device=where) for s, k in zip(shapes, kinds, strict=True))
            )
        self.weight, self.weight_scales, self.weight_groups = (
            nn.Parameter(tensor, requires_grad=False) for tensor in packed
        )
        self.bias = layer.bias

    @property
    def packed(self) -> Packed:
        return Packed(self.weight.data, self.weight_scales.data, self.weight_groups.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        made: torch.Tensor = nf4_linear(x, self.weight, self.weight_scales, self.weight_groups)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as it takes part in a product of this number format."""
        return _weight(self.packed, dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nf4"


def pack_layer(layer: nn.Linear) -> Nf4Linear:
    """A loaded layer's twin in NF4, on the same device; in training or not, as it was."""
    return Nf4Linear(layer, pack(layer.weight.data)).train(layer.training)
