"""Frozen weights in the order in which a processor's matrix library (oneDNN) reads them, kept beside the weights.

A product with few rows spends much of its time on bringing the weight into that order, each time anew; a weight that
never changes needs it once, and once more transposed for the backward pass. In fp32 on x86 processors, where torch has
oneDNN's product; elsewhere, and for what is compiled, weights are taken as they lie. The products are those of the same
numbers, rounded in another order. It changes no weight, and nothing of it is copied or saved with a model.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from trimtab.placement import bare_model

_Key = tuple[tuple[int, int], ...]


class Reordered:
    """Weights that read the same input, one above the other, in that order: made when they are first asked for, and
    anew where a weight is another one by then."""

    def __init__(self, copies: int = 1) -> None:
        """`copies`: 0, the weights are taken as they lie; 1, for the forward product; 2, for the backward one too."""
        self.copies = copies
        self._made: dict[bool, tuple[torch.Tensor, _Key]] = {}

    def product(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """`x @ cat(weights).T`; x: [rows, in], each weight: [out, in]."""
        if self.copies and _takes(x) and all(map(_takes, weights)):
            return _product(x, self._ordered(weights, back=False))
        if len(weights) == 1:
            return x @ weights[0].T
        out = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
        for part, weight in zip(columns(out, weights), weights, strict=True):
            torch.mm(x, weight.T, out=part)
        return out

    def back(self, gradient: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """`gradient @ cat(weights)`."""
        kept = self.copies and _takes(gradient) and all(map(_takes, weights))
        if kept and self.copies > 1:
            return _product(gradient, self._ordered(weights, back=True))
        if kept and len(weights) == 1:
            return _product(gradient, weights[0].detach().T)
        first, *rest = zip(columns(gradient, weights), weights, strict=True)
        out = first[0] @ first[1]
        for part, weight in rest:
            out.addmm_(part, weight)
        return out

    def make(self, *weights: torch.Tensor) -> None:
        """Now, and not in the first step that asks."""
        if all(map(_takes, weights)):
            for back in (False, True)[: self.copies]:
                self._ordered(weights, back=back)

    def forget(self) -> None:
        """Somebody may write to the weight without a trace (PEFT merges into its data)."""
        self._made = {}

    def _ordered(self, weights: Sequence[torch.Tensor], *, back: bool) -> torch.Tensor:
        now = tuple((weight.data_ptr(), weight._version) for weight in weights)
        found = self._made.get(back)
        if found is None or found[1] != now:
            joined = weights[0].detach() if len(weights) == 1 else torch.cat([w.detach() for w in weights])
            found = _in_order(joined.T.contiguous() if back else joined), now
            self._made[back] = found
        return found[0]

    def __reduce__(self) -> Any:
        return Reordered, (self.copies,)


def columns(wide: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The columns of a joint product that belong to each of its weights ([out, in])."""
    return (wide,) if len(weights) == 1 else wide.split([weight.shape[0] for weight in weights], 1)


def use_reordered(model: nn.Module, room: float) -> int:
    """Have whole layers, adapted layers beside them and a frozen head keep their weights so: in both orders, or in the
    forward one alone, or not, as `room` bytes hold them all; returns how many do."""
    from trimtab.fast.lora import FastLinear, is_bare
    from trimtab.fast.whole_layers import whole_layers

    found: list[tuple[Reordered, Sequence[torch.Tensor], nn.Module | None]] = []
    inside: set[nn.Module] = set()
    for layer, whole in whole_layers(model):
        inside.update(layer.modules())
        found += [(kept, weights, None) for kept, weights in whole.kept()]
    for module in model.modules():
        if isinstance(module, FastLinear) and module not in inside and is_bare(module.base_layer):
            weight: Any = module.base_layer.weight
            found.append((Reordered(), [weight], module))
    bare: Any = bare_model(model)
    head = bare.get_output_embeddings() if hasattr(bare, "get_output_embeddings") else None
    if head is not None and is_bare(head):
        found.append((Reordered(), [head.weight], head))
    found = [(kept, weights, module) for kept, weights, module in found if all(map(_takes, weights))]
    size = sum(weight.nbytes for _, weights, _ in found for weight in weights)
    copies = min(2, int(room // size)) if found and usable() else 0
    if not copies:
        return 0
    for kept, weights, holder in found:
        kept.copies = copies
        kept.make(*weights)
        if holder is not None:
            holder.__dict__["reordered"] = kept
    return len(found)


@cache
def usable() -> bool:
    """Whether this torch and processor have the product, and it gives what it should."""
    here = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    if not here or not all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    ):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        x, weight = torch.randn(5, 48), torch.randn(32, 48)
        try:
            found, again = _product(x, _in_order(weight)), _product(x, weight.T.contiguous().T)
        except (
            RuntimeError,
            TypeError,
        ):  # operators of torch's own compiler: another torch may call them otherwise
            return False
        due = x @ weight.T
        return all(y.shape == due.shape and torch.allclose(y, due, atol=1e-4) for y in (found, again))


def _takes(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
    )


def _in_order(weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return made


def _product(x: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, None, "none", [], "")
    return found
