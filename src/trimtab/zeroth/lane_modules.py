"""Modules with weights of their own for every lane, to stand in for those of a model while it is captured.

The weights are made by Triton kernels, wrapped as operators so that a compiler leaves them whole. Which module can be
stood in for, `kind_of` says; what it does not know is `NotCapturable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.zeroth import ahead, kernels, thin
from trimtab.zeroth.kernel_code import GROUP
from trimtab.zeroth.kernels import Launch
from trimtab.zeroth.rehearsed import with_values

_FEW_LANES = 4


class NotCapturable(Exception):
    """The model has a part that cannot be captured; the message names it."""


# The weights of these two come from the pass that runs (`ahead.py`), which may also write an owed update to them: no
# other operator of a layer reads a tuned weight, so a compiler need not know.
@torch.library.custom_op(
    "trimtab::perturbed_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor key, bool transposed, int run) -> Tensor",
)
def _perturbed_linear(x, weight, key, transposed, run):  # type: ignore[no-untyped-def]
    return ahead.running().product(x, weight, key, transposed, run)


@_perturbed_linear.register_fake
def _(x, weight, key, transposed, run):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 0])


@torch.library.custom_op(
    "trimtab::perturbed_linears",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] keys) -> Tensor",
)
def _perturbed_linears(x, weights, keys):  # type: ignore[no-untyped-def]
    return ahead.running().products(x, weights, keys)


@_perturbed_linears.register_fake
def _(x, weights, keys):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op(
    "trimtab::rescaled_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor anchor, Tensor ratios, Tensor key, Tensor state, bool stochastic,"
    " bool transposed, int run) -> Tensor",
)
def _rescaled_linear(x, weight, anchor, ratios, key, state, stochastic, transposed, run):  # type: ignore[no-untyped-def]
    def make(rows: Tensor, first: int) -> Tensor:
        start = first // weight.shape[1]
        base = anchor[start : start + rows.shape[0]]
        return kernels.rescaled(rows, base, ratios, key, state, stochastic, first)

    return _multiplied(x, weight, ratios.shape[0], transposed, run, make)


@_rescaled_linear.register_fake
def _(x, weight, anchor, ratios, key, state, stochastic, transposed, run):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 0])


def _multiplied(
    x: Tensor, weight: Tensor, lanes: int, transposed: bool, run: int, make: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Each lane's share of the rows by the lane's own weight, which is made `run` rows at a time."""
    shares = x.reshape(lanes, -1, x.shape[-1])
    if transposed:
        return torch.bmm(shares, make(weight, 0)).view(*x.shape[:-1], weight.shape[1])
    height, width = weight.shape
    out = x.new_empty(*x.shape[:-1], height)
    columns = out.view(lanes, -1, height)
    for first in range(0, height, run):
        made = make(weight[first : first + run], first * width)
        torch.bmm(shares, made.transpose(1, 2), out=columns[..., first : first + run])
    return out


@torch.library.custom_op(
    "trimtab::perturbed_rows",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor key) -> Tensor",
)
def _perturbed_rows(table, ids, key):  # type: ignore[no-untyped-def]
    return ahead.running().rows(table, ids, key)


@_perturbed_rows.register_fake
def _(table, ids, key):  # type: ignore[no-untyped-def]
    return table.new_empty((*ids.shape, table.shape[1]))


class Noisy(nn.Module):
    """A matrix of each lane, made from a parameter: here by noise."""

    def __init__(self, launch: Launch, index: int) -> None:
        super().__init__()
        self.lanes = launch.coefficients.numel()
        key = torch.tensor([index], dtype=torch.int32, device=launch.state.device)
        self.register_buffer("key", key, persistent=False)

    def multiply(self, x: Tensor, weight: Tensor, transposed: bool, run: int) -> Tensor:
        made: Tensor = _perturbed_linear(x, weight, self.key, transposed, run)
        return made

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        made: Tensor = _perturbed_rows(table, ids, self.key)
        return made


class Rescaled(nn.Module):
    """Here by a ratio of its distance from an anchor."""

    def __init__(self, launch: Launch, index: int, anchor: Tensor, ratios: Tensor, stochastic: bool) -> None:
        super().__init__()
        self.lanes, self.stochastic = ratios.numel(), stochastic
        self.register_buffer("anchor", anchor, persistent=False)
        self.register_buffer("ratios", ratios, persistent=False)
        self.register_buffer("state", launch.state, persistent=False)
        key = torch.tensor([index], dtype=torch.int32, device=launch.state.device)
        self.register_buffer("key", key, persistent=False)

    def multiply(self, x: Tensor, weight: Tensor, transposed: bool, run: int) -> Tensor:
        how = (self.anchor, self.ratios, self.key, self.state, self.stochastic)
        made: Tensor = _rescaled_linear(x, weight, *how, transposed, run)
        return made


class Ready(nn.Module):
    """Copies of a small tensor, made before the pass began."""

    def __init__(self, copies: Tensor) -> None:
        super().__init__()
        self.lanes = copies.shape[0]
        self.register_buffer("copies", copies, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        copies: Tensor = self.copies  # type: ignore[assignment]
        return copies


class LaneLinear(nn.Module):
    """nn.Linear and transformers' Conv1D, with weights of their own for every lane's share of the rows."""

    given: tuple[Tensor, Tensor] | None = None
    """An input, and the product with it that was made together with others (`JOINED`)."""

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
        weight: Tensor = self.weight
        if self.given is not None and self.given[0] is x:
            out: Tensor = self.given[1]
        elif self.make_weight is not None:
            out = self.make_weight.multiply(x, weight, self.transposed, self.run)
        else:
            out = x @ weight if self.transposed else F.linear(x, weight)
        if self.make_bias is not None:
            biases: Tensor = self.make_bias(self.bias)[:, None]
            out = (out.reshape(self.lanes, -1, out.shape[-1]) + biases).view(out.shape)
        elif self.bias is not None:
            out = out + self.bias
        return out


JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same input in most models. One that is called with another multiplies itself."""


def joined_class(owner: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The same class, whose forward makes the products of these layers as one first. One for each, as compilers ask."""
    key = (owner, names)
    if key not in _joined_classes:
        _joined_classes[key] = _made_joined(owner, names)
    return _joined_classes[key]


_joined_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _made_joined(owner: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [getattr(self, name) for name in names]
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor) and x.shape[-1] == layers[0].weight.shape[1]:
            weights = [layer.weight for layer in layers]
            wide = _perturbed_linears(x, weights, [layer.make_weight.key for layer in layers])
            for layer, part in zip(layers, wide.split([len(w) for w in weights], -1), strict=True):
                layer.given = (x, part)
        out = owner.forward(self, *args, **kwargs)
        for layer in layers:
            layer.given = None
        return out

    return type(owner.__name__, (owner,), {"forward": forward, "__module__": owner.__module__})


def may_join(layers: list[Any], scratch: int) -> bool:
    """Whether these read weights made by noise that may be one product's: of one width, and small enough together."""
    if not all(isinstance(layer, LaneLinear) and isinstance(layer.make_weight, Noisy) for layer in layers):
        return False
    first = layers[0].weight
    alike = all(
        layer.weight.dtype == first.dtype and layer.weight.shape[1] == first.shape[1] and not layer.transposed
        for layer in layers
    )
    if any(len(layer.weight) >= thin.LEAST_HEIGHT for layer in layers):
        return False  # over few rows each is a product of its own kind
    return alike and layers[0].lanes * sum(layer.weight.numel() for layer in layers) <= scratch


class LaneEmbedding(nn.Module):
    def __init__(self, own: nn.Embedding, weight: Noisy) -> None:
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
        scale = self._spread(x, self.weight, self.make_weight)
        if self.plus_one:
            out = wide * (1.0 + scale.float())
        elif self.centred:
            out = wide * scale.float()
        else:
            out = scale * wide.to(x.dtype)
        if self.bias is not None:
            out = out + self._spread(x, self.bias, self.make_bias).float()
        return out.to(x.dtype)

    def _spread(self, x: Tensor, own: Any, make: nn.Module | None) -> Tensor:
        """Each row with its lane's copy. In x's own shape: a compiler joins that to the norm, a change of shape not."""
        if make is None:
            return own  # type: ignore[no-any-return]
        rows, width = x.shape[0] // self.lanes, x.shape[-1]
        if torch.compiler.is_compiling() and self.lanes <= _FEW_LANES:
            # A choice between whole copies: looked up row by row, a kernel would read a scale for every element.
            every: Tensor = make(own)
            number = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1))
            scale = every[-1]
            for lane in range(self.lanes - 2, -1, -1):
                scale = torch.where(number < (lane + 1) * rows, every[lane], scale)
            return scale
        copies: Tensor = make(own)[:, None].expand(self.lanes, rows, width)
        return copies.reshape(x.shape[0], *[1] * (x.dim() - 2), width)


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
    if isinstance(module, nn.LayerNorm) and (weight is None or weight.dim() != 1):
        raise NotCapturable("a LayerNorm over several dimensions, or without a scale")
    if type(module).forward is nn.LayerNorm.forward:
        return "norm"
    generator = torch.Generator().manual_seed(0)
    if type(weight) not in (Tensor, nn.Parameter):  # a virtual GPU's: no value to judge by
        module = with_values(module, generator)
        weight = module.weight
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
