"""Modules with weights of their own for every lane, to stand in for those of a model while it is captured.

The weights are made by Triton kernels, wrapped as operators so that a compiler leaves them whole. Which module can be
stood in for, `kind_of` says; what it does not know is `NotCapturable`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.zeroth import kernels
from trimtab.zeroth.kernels import GROUP, Launch


class NotCapturable(Exception):
    """The model has a part that cannot be captured; the message names it."""


@torch.library.custom_op(
    "trimtab::perturbed",
    mutates_args=(),
    schema="(Tensor weight, Tensor key, Tensor state, Tensor coefficients, bool one_line, bool signs, SymInt first)"
    " -> Tensor",
)
def _perturbed(weight, key, state, coefficients, one_line, signs, first):  # type: ignore[no-untyped-def]
    return kernels.perturbed(weight, key, state, coefficients, one_line, signs, first)


@_perturbed.register_fake
def _(weight, key, state, coefficients, one_line, signs, first):  # type: ignore[no-untyped-def]
    return weight.new_empty((coefficients.shape[0], *weight.shape))


@torch.library.custom_op(
    "trimtab::perturbed_rows",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor key, Tensor state, Tensor coefficients, bool one_line, bool signs)"
    " -> Tensor",
)
def _perturbed_rows(table, ids, key, state, coefficients, one_line, signs):  # type: ignore[no-untyped-def]
    return kernels.perturbed_rows(table, ids, key, state, coefficients, one_line, signs)


@_perturbed_rows.register_fake
def _(table, ids, key, state, coefficients, one_line, signs):  # type: ignore[no-untyped-def]
    return table.new_empty((*ids.shape, table.shape[1]))


@torch.library.custom_op(
    "trimtab::rescaled", mutates_args=(), schema="(Tensor weight, Tensor anchor, Tensor ratios) -> Tensor"
)
def _rescaled(weight, anchor, ratios):  # type: ignore[no-untyped-def]
    return kernels.rescaled(weight, anchor, ratios)


@_rescaled.register_fake
def _(weight, anchor, ratios):  # type: ignore[no-untyped-def]
    return weight.new_empty((ratios.shape[0], *weight.shape))


class Noisy(nn.Module):
    """How a tensor of each lane is made from a parameter: by noise, or by a ratio of its distance from an anchor."""

    def __init__(self, launch: Launch, index: int, one_line: bool, signs: bool) -> None:
        super().__init__()
        self.lanes = launch.coefficients.numel()
        self.one_line, self.signs = one_line, signs
        self.register_buffer("state", launch.state, persistent=False)
        self.register_buffer("coefficients", launch.coefficients, persistent=False)
        key = torch.tensor([index], dtype=torch.int32, device=launch.state.device)
        self.register_buffer("key", key, persistent=False)

    def forward(self, weight: Tensor, first: int = 0) -> Tensor:
        made: Tensor = _perturbed(
            weight, self.key, self.state, self.coefficients, self.one_line, self.signs, first
        )
        return made

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        made: Tensor = _perturbed_rows(
            table, ids, self.key, self.state, self.coefficients, self.one_line, self.signs
        )
        return made


class Rescaled(nn.Module):
    def __init__(self, anchor: Tensor, ratios: Tensor) -> None:
        super().__init__()
        self.lanes = ratios.numel()
        self.register_buffer("anchor", anchor, persistent=False)
        self.register_buffer("ratios", ratios, persistent=False)

    def forward(self, weight: Tensor, first: int = 0) -> Tensor:
        width = weight.shape[1]
        anchor = self.anchor[first // width : first // width + weight.shape[0]]  # type: ignore[index]
        made: Tensor = _rescaled(weight, anchor, self.ratios)
        return made

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        chosen = ids.reshape(self.lanes, -1)
        rows = torch.stack(
            [
                _rescaled(table[chosen[i]], self.anchor[chosen[i]], self.ratios[i : i + 1])[0]  # type: ignore[index]
                for i in range(self.lanes)
            ]
        )
        return rows.reshape(*ids.shape, table.shape[1])


class LaneLinear(nn.Module):
    """nn.Linear and transformers' Conv1D, with weights of their own for every lane's share of the rows."""

    def __init__(
        self, own: Any, transposed: bool, weight: Any | None, bias: Any | None, scratch: int
    ) -> None:
        super().__init__()
        self.weight, self.bias = own.weight, own.bias
        self.transposed = transposed
        self.make_weight, self.make_bias = weight, bias
        self.lanes = int((weight or bias).lanes)  # type: ignore[union-attr]
        height, width = own.weight.shape
        rows = max(1, scratch // (self.lanes * width))
        # Runs of rows begin at whole groups of noise.
        self.run = height if rows >= height or transposed else max(GROUP, rows // 64 * 64)

    def forward(self, x: Tensor) -> Tensor:
        shares = x.reshape(self.lanes, -1, x.shape[-1])
        weight: Tensor = self.weight
        if self.make_weight is None:
            flat = shares.reshape(-1, x.shape[-1])
            out = (flat @ weight if self.transposed else F.linear(flat, weight)).view(*shares.shape[:2], -1)
        elif self.transposed:
            out = torch.bmm(shares, self.make_weight(weight))
        elif self.run == weight.shape[0]:
            out = torch.bmm(shares, self.make_weight(weight).transpose(1, 2))
        else:
            out = shares.new_empty(*shares.shape[:2], weight.shape[0])
            for first in range(0, weight.shape[0], self.run):
                some = weight[first : first + self.run]
                made = self.make_weight(some, first * weight.shape[1])
                torch.bmm(shares, made.transpose(1, 2), out=out[..., first : first + self.run])
        if self.make_bias is not None:
            out = out + self.make_bias(self.bias)[:, None]
        elif self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], out.shape[-1])


class LaneEmbedding(nn.Module):
    def __init__(self, own: nn.Embedding, weight: Noisy | Rescaled) -> None:
        super().__init__()
        self.weight, self.make_weight = own.weight, weight
        self.num_embeddings, self.embedding_dim = own.num_embeddings, own.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        return self.make_weight.rows(self.weight, ids)


class LaneNorm(nn.Module):
    """RMSNorm and LayerNorm with scales of their own for each lane."""

    def __init__(
        self, own: nn.Module, weight: nn.Module | None, bias: nn.Module | None, plus_one: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = own.weight, getattr(own, "bias", None)
        self.make_weight, self.make_bias = weight, bias
        self.lanes = int((weight or bias).lanes)  # type: ignore[union-attr, arg-type]
        self.eps = _norm_eps(own)
        self.centred = isinstance(own, nn.LayerNorm)
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.centred:
            wide = F.layer_norm(wide, (x.shape[-1],), None, None, self.eps)
        else:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        shares = wide.reshape(self.lanes, -1, x.shape[-1])
        weight: Tensor = self.weight  # type: ignore[assignment]
        scale = self.make_weight(weight)[:, None] if self.make_weight is not None else weight
        if self.plus_one:
            out = shares * (1.0 + scale.float())
        elif self.centred:
            out = shares * scale.float()
        else:
            out = scale * shares.to(x.dtype)
        if self.bias is not None:
            shift = self.make_bias(self.bias)[:, None] if self.make_bias is not None else self.bias
            out = out + shift.float()
        return out.to(x.dtype).reshape(x.shape)


def kind_of(module: nn.Module) -> str:
    forward, name = type(module).forward, type(module).__name__
    if forward is nn.Linear.forward:
        return "linear"
    if name == "Conv1D" and module.weight.dim() == 2:  # type: ignore[operator]
        return "conv1d"
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward and module.max_norm is None:
        if module.embedding_dim % GROUP == 0:
            return "embedding"
        raise NotCapturable(
            f"an embedding of width {module.embedding_dim}, which is not a multiple of {GROUP}"
        )
    if set(module._parameters) <= {"weight", "bias"} and ("Norm" in name) and _norm_eps(module) is not None:
        return _norm_kind(module)
    raise NotCapturable(f"{name} owns tuned tensors, and its forward is not known")


def _norm_eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm_kind(module: Any) -> str:
    """Which formula a norm follows, found by trying: the module's own forward is the judge."""
    weight = module.weight
    if isinstance(module, nn.LayerNorm):
        if module.normalized_shape == tuple(weight.shape) and weight.dim() == 1:
            return "norm"
        raise NotCapturable("a LayerNorm over several dimensions, or without a scale")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, weight.shape[0], generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        expected = module(x)
        for kind in ("norm", "norm plus one"):
            trial = LaneNorm(module, _Same(), None, kind == "norm plus one")
            if torch.allclose(trial(x), expected, rtol=2e-2, atol=1e-2):
                return kind
    raise NotCapturable(f"{type(module).__name__} follows none of the known formulas of a norm")


class _Same(nn.Module):
    """One lane with the weight as it is."""

    lanes = 1

    def forward(self, weight: Tensor) -> Tensor:
        return weight[None]
