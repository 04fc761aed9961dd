"""The gated MLP of a decoder layer with the adapters of its three layers, in fewer passes over its wide activations.

Gate and up are one product; what their adapters add is computed by the kernels that read it, what silu and up make
together is not kept but made again in the backward pass, where the small gradients are summed while the wide ones are
there. Only MLPs that compute
`down(silu(gate(x)) * up(x))` are changed, which is tried on each kind of them first.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.fast.kernels import HALVES, usable_on
from trimtab.fast.lora import Adapter, FastLinear, in_computing_format, is_bare, plain_adapter
from trimtab.fast.products import onto
from trimtab.fast.siblings import join_weights
from trimtab.models.load import shapes_only

MOST_RANK = 64
"""With more, the tiles of a kernel no longer fit into registers."""
_CLOSE = 2e-2


class _Weights(NamedTuple):
    """Frozen weights: gate and up one above the other, or each by itself where they may not lie in one storage."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    both: torch.Tensor | None


@cache
def _fused_class(mlp: type[nn.Module]) -> type[nn.Module]:
    """The same class with the fused forward. One for each class, as compilers ask."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = [self.gate_proj, self.up_proj, self.down_proj]
        adapters = [plain_adapter(layer) for layer in layers]
        if args or kwargs or not self.training or not torch.is_grad_enabled() or not _alike(adapters):
            return mlp.forward(self, x, *args, **kwargs)
        x = in_computing_format(x, self.gate_proj.base_layer.weight)
        gate, up, down = (layer.base_layer.weight for layer in layers)
        return fused_mlp(x, _Weights(gate, up, down, self.joint_weight), adapters)

    return type(mlp.__name__, (mlp,), {"forward": forward, "__module__": mlp.__module__})


def _alike(adapters: list[Adapter | None]) -> bool:
    """Whether all three layers have an adapter, of one rank and without dropout."""
    ranks = {a.a.shape[0] for a in adapters if a is not None and not a.drops}
    return None not in adapters and len(ranks) == 1 and not any(a.drops for a in adapters if a)


def fused_mlp(x: torch.Tensor, weights: _Weights, adapters: list[Any]) -> torch.Tensor:
    gate, up, down = adapters
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = _Fused.apply(
        rows, *weights, gate.a, gate.b, up.a, up.b, down.a, down.b, (gate.scale, up.scale, down.scale)
    )
    return out.view(x.shape[:-1] + out.shape[-1:])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        both: torch.Tensor | None,
        gate_a: torch.Tensor,
        gate_b: torch.Tensor,
        up_a: torch.Tensor,
        up_b: torch.Tensor,
        down_a: torch.Tensor,
        down_b: torch.Tensor,
        scales: tuple[float, float, float],
    ) -> torch.Tensor:
        from trimtab.fast.kernels.swiglu import swiglu

        dtype, rank = x.dtype, gate_a.shape[0]
        into = torch.cat([gate_a, up_a]).to(dtype)
        gate_up, up_up, down_up = (
            (b * s).to(dtype) for b, s in zip((gate_b, up_b, down_b), scales, strict=True)
        )
        down_in = down_a.to(dtype)
        narrow = x @ into.T
        columns = gate.shape[0]
        if both is None:
            g, u = x @ gate.T, x @ up.T
        else:
            wide = x @ both.T
            g, u = wide[:, :columns], wide[:, columns:]
        # Without what their adapters add: the kernels do, wherever they read them.
        made = swiglu(g, u, narrow[:, :rank], narrow[:, rank:], gate_up, up_up)
        thin = made @ down_in.T
        out: torch.Tensor = onto(made, down.T, thin, down_up.T)
        ctx.save_for_backward(
            x, gate, up, down, both, g, u, narrow, thin, into, gate_up, up_up, down_in, down_up
        )
        ctx.scales, ctx.format = scales, gate_a.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from trimtab.fast.kernels.swiglu import swiglu_backward

        x, gate, up, down, both, g, u, narrow, thin, into, gate_up, up_up, down_in, down_up = (
            ctx.saved_tensors
        )
        grad = grads[0].contiguous()
        columns, rank = g.shape[1], thin.shape[1]
        to_thin = grad @ down_up
        wide, sums = swiglu_backward(
            grad @ down, to_thin, down_in, g, u, narrow[:, :rank], narrow[:, rank:], gate_up, up_up
        )
        if both is None:
            to_narrow = torch.cat([wide[:, :columns] @ gate_up, wide[:, columns:] @ up_up], 1)
            grad_x = onto(wide[:, :columns], gate, to_narrow, into).addmm(wide[:, columns:], up)
        else:
            to_narrow = wide @ torch.block_diag(gate_up, up_up)
            grad_x = onto(wide, both, to_narrow, into)
        grad_into = (to_narrow.T @ x).to(ctx.format)
        grad_down_b = (grad.T @ thin).to(ctx.format) * ctx.scales[2]
        return (
            grad_x,
            None,
            None,
            None,
            None,
            grad_into[:rank],
            sums[1].T * ctx.scales[0],
            grad_into[rank:],
            sums[2].T * ctx.scales[1],
            sums[0],
            grad_down_b,
            None,
        )


def use_fused_mlp(model: nn.Module, *, joined: bool = True) -> int:
    """Change every MLP of the model that it is sound for; returns how many.

    `joined`: lay the weights of gate and up into one storage. Not for weights that are sharded later, each by itself.
    """
    tried: dict[type, bool] = {}
    changed = 0
    mlp: Any
    for mlp in model.modules():
        if not _has_the_parts(mlp):
            continue
        if type(mlp) not in tried:
            tried[type(mlp)] = _agrees(mlp)
        if tried[type(mlp)]:
            layers = [mlp.gate_proj.base_layer, mlp.up_proj.base_layer]
            mlp.__dict__["joint_weight"] = join_weights(layers) if joined else None
            mlp.__class__ = _fused_class(type(mlp))  # type: ignore[arg-type]
            changed += 1
    return changed


def _has_the_parts(mlp: Any) -> bool:
    layers: list[Any] = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(layer, FastLinear) and is_bare(layer.base_layer) for layer in layers):
        return False
    if any(layer.base_layer.bias is not None for layer in layers) or hasattr(mlp, "joint_weight"):
        return False
    adapters = [plain_adapter(layer) for layer in layers]
    weight = layers[0].base_layer.weight
    return (
        usable_on(weight)
        and weight.dtype in HALVES
        and weight.shape == layers[1].base_layer.weight.shape
        and all(a is not None and a.a.shape[0] <= MOST_RANK for a in adapters)
        and _alike(adapters)
    )


@torch.no_grad()
def _agrees(mlp: Any) -> bool:
    """Whether this kind of MLP computes what its fused form does, tried on a few random rows."""
    if shapes_only():
        act, few = getattr(mlp, "act_fn", None), torch.linspace(-4, 4, 9, device="cpu")
        return callable(act) and torch.allclose(act(few), nn.functional.silu(few))
    weight = mlp.gate_proj.base_layer.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, weight.shape[1], generator=generator).to(weight)
    adapters = [plain_adapter(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    weights = _Weights(weight, mlp.up_proj.base_layer.weight, mlp.down_proj.base_layer.weight, None)
    expected = mlp(x).float()
    found = fused_mlp(x, weights, adapters).float()
    return bool((found - expected).norm() <= _CLOSE * expected.norm())
