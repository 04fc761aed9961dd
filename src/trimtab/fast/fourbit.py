"""Four-bit base weights in a fast step: unpacked by one launch each, and the adapter's product made beneath theirs.

A weight is unpacked where its product is made, in the forward pass and again in the backward pass, inside one operation
that a compiler cannot look into: nothing unpacked is kept. Where Triton cannot run, plain torch unpacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from trimtab.fast.kernels import usable_on
from trimtab.models.nf4 import Packed
from trimtab.models.nf4_linear import Nf4Linear, unpack_by, weight_of

if TYPE_CHECKING:
    from trimtab.fast.lora import Adapter


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


@torch.library.custom_op("trimtab::nf4_onto", mutates_args=())
def nf4_onto(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    t: torch.Tensor,
    b: torch.Tensor,
    back: bool,
) -> torch.Tensor:
    """`x @ weight.T + t @ b`, or with `back` `x @ weight + t @ b`; on rows."""
    weight = weight_of(Packed(codes, scales, groups), x.dtype)
    return torch.mm(t, b).addmm_(x, weight if back else weight.T)


@nf4_onto.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    t: torch.Tensor,
    b: torch.Tensor,
    back: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], b.shape[1])


@register_flop_formula(torch.ops.trimtab.nf4_onto)
def _flops(
    x: Any,
    codes: Any,
    scales: Any,
    groups: Any,
    t: Any,
    b: Any,
    *more: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    return int(4 * x[0] * codes[0] * codes[1] + 2 * t[0] * t[1] * b[1])


def is_bare_packed(layer: nn.Module) -> TypeGuard[Nf4Linear]:
    """A packed layer that nobody listens to: its product may be made without calling it."""
    return (
        type(layer) is Nf4Linear
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def packed_product(layer: Nf4Linear, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """What a packed layer and its adapter give for x."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    held = (layer.weight, layer.weight_scales, layer.weight_groups)
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = _Product.apply(rows, *held, adapter.a, adapter.b, adapter.scale)
    if layer.bias is not None:
        out = out + layer.bias.to(out.dtype)
    return out.view(x.shape[:-1] + out.shape[-1:])


class _Product(torch.autograd.Function):
    """`lora.Product` over a packed weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        groups: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        down, up = a.to(x.dtype), (b * scale).to(x.dtype)
        narrow = x @ down.T
        ctx.save_for_backward(x, codes, scales, groups, down, up, narrow)
        ctx.scale, ctx.format = scale, a.dtype
        out: torch.Tensor = nf4_onto(x, codes, scales, groups, narrow, up.T, False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, codes, scales, groups, down, up, narrow = ctx.saved_tensors
        grad = grads[0]
        small = grad @ up
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = nf4_onto(grad, codes, scales, groups, small, down, True)
        grad_a = (small.T @ x).to(ctx.format)
        grad_b = (grad.T @ narrow).to(ctx.format) * ctx.scale
        return grad_x, None, None, None, grad_a, grad_b, None
