"""LoRA linears that compute in the activations' own number format, in place of PEFT's forward.

PEFT casts the layer's input to the adapter's fp32, multiplies, and casts back: three passes over each wide activation.
Here the small matrices are cast instead, and the base product is accumulated onto the adapter's. The modules stay
PEFT's, with its names and parameters: what is saved loads in plain PEFT. Where a layer is merged, switched off, of
several adapters or of a variant (DoRA), PEFT's own forward is taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn

from trimtab.fast.fourbit import is_bare_packed, packed_product
from trimtab.fast.products import onto
from trimtab.fast.reordered import Reordered


class Adapter(NamedTuple):
    """The one plain adapter of a layer, as it takes part in a pass."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    dropout: nn.Module

    @property
    def drops(self) -> bool:
        return self.dropout.training and getattr(self.dropout, "p", 0.0) > 0


class FastLinear(PeftLinear):
    """A layer of PEFT whose class was changed; it is never constructed."""

    given: tuple[torch.Tensor, torch.Tensor] | None = None
    """An input, and this layer's output for it, which `siblings.py` has made together with others."""
    reordered: Reordered | None = None
    """The weight once more, as a processor reads it best."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.given
        if given is not None and given[0] is x:
            return given[1]
        adapter = None if args or kwargs else plain_adapter(self)
        if adapter is None:
            if self.reordered is not None and self.merged:
                self.reordered.forget()
            result: torch.Tensor = super().forward(x, *args, **kwargs)
            return result
        if not adapter.drops and is_bare_packed(self.base_layer):
            return packed_product(self.base_layer, x, adapter)
        if adapter.drops or not is_bare(self.base_layer):
            return _added(self.base_layer(x), x, adapter)
        base: Any = self.base_layer
        x = in_computing_format(x, base.weight)
        rows = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = Product.apply(
            rows, base.weight, adapter.a, adapter.b, adapter.scale, self.reordered
        )
        if base.bias is not None:
            out = out + base.bias.to(out.dtype)
        return out.view(x.shape[:-1] + out.shape[-1:])


def plain_adapter(layer: Any) -> Adapter | None:
    """The adapter of this layer, where exactly one of the plain kind is in force."""
    if layer.disable_adapters or layer.merged:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or names[0] in layer.lora_variant:
        return None
    name = names[0]
    a, b = layer.lora_A[name], layer.lora_B[name]
    if a.bias is not None or b.bias is not None:
        return None
    return Adapter(a.weight, b.weight, layer.scaling[name], layer.lora_dropout[name])


def is_bare(layer: nn.Module) -> bool:
    """A frozen linear layer that nobody listens to: its product may be made without calling it."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not layer.weight.requires_grad
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def in_computing_format(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a product with this weight computes in: autocast's format, or the weight's."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x.to(weight.dtype)


def _added(base: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """`base + scale * dropout(x) @ a.T @ b.T`, in the format of `base`."""
    narrow = F.linear(adapter.dropout(x.to(base.dtype)), adapter.a.to(base.dtype))
    return base + F.linear(narrow, (adapter.b * adapter.scale).to(base.dtype))


class Product(torch.autograd.Function):
    """A frozen weight with its adapter, on rows: `x @ weight.T + scale * x @ a.T @ b.T`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
        reordered: Reordered | None = None,
    ) -> torch.Tensor:
        weight = weight.to(x.dtype)
        down, up = a.to(x.dtype), b.to(x.dtype)
        # The scale goes to the smallest of the three.
        narrow = (x @ down.T) * scale
        ctx.save_for_backward(x, weight, down, up, narrow)
        ctx.scale, ctx.format, ctx.reordered = scale, a.dtype, reordered
        out: torch.Tensor
        if reordered is not None:
            out = reordered.product(x, weight).addmm_(narrow, up.T)
        else:
            out = onto(x, weight.T, narrow, up.T)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up, narrow = ctx.saved_tensors
        grad = grads[0]
        small = (grad @ up) * ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0] and ctx.reordered is not None:
            grad_x = ctx.reordered.back(grad, weight).addmm_(small, down)
        elif ctx.needs_input_grad[0]:
            grad_x = onto(grad, weight, small, down)
        # A processor takes longer for the first of two where that is wide and transposed.
        to_up = (narrow.T @ grad).T.contiguous() if grad.device.type == "cpu" else grad.T @ narrow
        return grad_x, None, (small.T @ x).to(ctx.format), to_up.to(ctx.format), None, None


def use_fast_adapters(model: nn.Module) -> int:
    """Let every LoRA linear of the model compute so; returns how many there are."""
    layers = [module for module in model.modules() if type(module) is PeftLinear]
    for layer in layers:
        layer.__class__ = FastLinear
    return sum(isinstance(module, FastLinear) for module in model.modules())
