"""Layers that read the same input, such as q, k and v of an attention, as one product with the adapters of all.

Their weights are laid one above the other in one storage, of which each keeps its part. What they give is handed to
each of them for that very input; called with another, a layer computes for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from trimtab.fast.lora import FastLinear, in_computing_format, is_bare, plain_adapter
from trimtab.fast.products import onto

QKV = ("q_proj", "k_proj", "v_proj")


def use_joint_products(model: nn.Module) -> int:
    """Join q, k and v in every attention of the model where that is sound; returns in how many.

    Not for weights that are sharded later, each by itself.
    """
    changed = 0
    for module in model.modules():
        layers: list[Any] = [getattr(module, name, None) for name in QKV]
        if all(map(_may_join, layers)) and _alike(layers) and not hasattr(module, "joint_weight"):
            # A plain attribute: the storage is the layers' own, and no state dict shows it twice.
            module.__dict__["joint_weight"] = join_weights([layer.base_layer for layer in layers])
            module.__class__ = _joint_class(type(module))  # type: ignore[arg-type]
            changed += 1
    return changed


def join_weights(layers: Sequence[Any]) -> torch.Tensor:
    """The weights of the layers in one storage, one above the other; theirs become views of it."""
    joined = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, joined.split([len(layer.weight) for layer in layers]), strict=True):
        layer.weight.data = part
    return joined


def _may_join(layer: Any) -> bool:
    return isinstance(layer, FastLinear) and is_bare(layer.base_layer) and plain_adapter(layer) is not None


def _alike(layers: list[Any]) -> bool:
    weights = [layer.base_layer.weight for layer in layers]
    return len({(w.shape[1], w.dtype, w.device) for w in weights}) == 1


@cache
def _joint_class(attention: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose forward makes the three products first. One for each class, as compilers ask."""

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [self.q_proj, self.k_proj, self.v_proj]
        adapters = [plain_adapter(layer) for layer in layers]
        joins = self.training and isinstance(hidden_states, torch.Tensor) and hidden_states.dim() >= 2
        if joins and all(a is not None and not a.drops for a in adapters):
            made = joint_product(hidden_states, self.joint_weight, layers, adapters)
            for layer, part in zip(layers, made, strict=True):
                layer.given = (hidden_states, part)
        out = attention.forward(self, hidden_states, *args, **kwargs)
        for layer in layers:
            layer.given = None
        return out

    return type(attention.__name__, (attention,), {"forward": forward, "__module__": attention.__module__})


def joint_product(
    x: torch.Tensor, weight: torch.Tensor, layers: Sequence[Any], adapters: Sequence[Any]
) -> list[torch.Tensor]:
    """What each of the layers gives for x."""
    x = in_computing_format(x, weight)
    parts = _Joint.apply(
        x.reshape(-1, x.shape[-1]),
        weight,
        tuple(a.scale for a in adapters),
        *(a.a for a in adapters),
        *(a.b for a in adapters),
    )
    out = []
    for layer, part in zip(layers, parts, strict=True):
        part = part.view(x.shape[:-1] + part.shape[-1:])
        bias = layer.base_layer.bias
        out.append(part if bias is None else part + bias.to(part.dtype))
    return out


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: tuple[float, ...], *small: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(scales)
        downs, ups = small[:count], small[count:]
        weight = weight.to(x.dtype)
        down = torch.cat(downs).to(x.dtype)
        up = torch.block_diag(*(b * s for b, s in zip(ups, scales, strict=True))).to(x.dtype)
        narrow = x @ down.T
        ctx.save_for_backward(x, weight, down, up, narrow)
        ctx.scales, ctx.format = scales, downs[0].dtype
        ctx.ranks, ctx.widths = [len(a) for a in downs], [len(b) for b in ups]
        wide = onto(x, weight.T, narrow, up.T)
        parts: tuple[torch.Tensor, ...] = wide.split(ctx.widths, 1)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up, narrow = ctx.saved_tensors
        grad = torch.cat(grads, 1)
        small = grad @ up
        grad_x = onto(grad, weight, small, down)
        to_downs = (small.T @ x).to(ctx.format).split(ctx.ranks)
        to_ups = (grad.T @ narrow).to(ctx.format).split(ctx.widths)
        first = 0
        blocks = []
        for rows, rank, scale in zip(to_ups, ctx.ranks, ctx.scales, strict=True):
            blocks.append(rows[:, first : first + rank] * scale)
            first += rank
        return grad_x, None, None, *to_downs, *blocks
