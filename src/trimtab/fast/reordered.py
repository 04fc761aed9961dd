"""Frozen weights in the order in which a processor's matrix library (oneDNN) reads them, kept beside the weights.

A product with few rows spends much of its time on bringing the weight into that order, each time anew; a weight that
never changes needs it once. In fp32 on x86 processors, where torch has oneDNN's product; elsewhere, and for what is
compiled, weights are taken as they lie. The products are those of the same numbers, rounded in another order. It
changes no weight, and nothing of it is copied or saved with a model.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import nn

from trimtab.placement import bare_model


class Reordered:
    """One weight in that order: made when it is first asked for, and anew where the weight is another one by then."""

    def __init__(self) -> None:
        self._made: torch.Tensor | None = None
        self._of: tuple[int, int] | None = None

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T`; x: [rows, in], weight: [out, in]."""
        if not _takes(x) or not _takes(weight):
            return x @ weight.T
        now = weight.data_ptr(), weight._version
        if self._made is None or self._of != now:
            self._made, self._of = _ordered(weight.detach()), now
        return _product(x, self._made)

    def back(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`gradient @ weight`, of the weight as it lies: the same product, and no second copy."""
        if not _takes(gradient) or not _takes(weight):
            return gradient @ weight
        return _product(gradient, weight.detach().T)

    def forget(self) -> None:
        """Somebody may write to the weight without a trace (PEFT merges into its data)."""
        self._made = None

    def __reduce__(self) -> Any:
        return Reordered, ()


def use_reordered(model: nn.Module, room: float) -> int:
    """Have the adapted layers and a frozen head keep their weights so, if all copies take `room` bytes at most; returns
    how many do."""
    from trimtab.fast.lora import FastLinear, is_bare

    found: dict[nn.Module, Any] = {
        module: module.base_layer.weight
        for module in model.modules()
        if isinstance(module, FastLinear) and is_bare(module.base_layer)
    }
    bare: Any = bare_model(model)
    head = bare.get_output_embeddings() if hasattr(bare, "get_output_embeddings") else None
    if head is not None and is_bare(head):
        found[head] = head.weight
    found = {module: weight for module, weight in found.items() if _takes(weight)}
    if not usable() or sum(weight.nbytes for weight in found.values()) > room:
        return 0
    for module in found:
        module.__dict__["reordered"] = Reordered()
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
            found, again = _product(x, _ordered(weight)), _product(x, weight.T.contiguous().T)
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


def _ordered(weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return made


def _product(x: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, None, "none", [], "")
    return found
