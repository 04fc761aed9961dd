"""How many floating-point operations the training of a model needs for the rows of a step, as it is trained.

A frozen weight takes four for each token and number (the product, and the gradient of what went in), a trained one six;
attention by the rows' real lengths, of which a token sees half; the head at the places that are computed alone. What is
computed again to save memory is not counted: it is no need of the model. It counts, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.placement import bare_model


@dataclass(frozen=True)
class ModelFlops:
    """What one token, one place of the head and one pair of tokens cost."""

    token: float
    place: float
    pair: float
    """Of one layer's attention."""
    windows: tuple[int | None, ...]
    """How far back a token sees, layer by layer; None: as far as its row goes."""

    def of(self, lengths: Iterable[int], places: int) -> float:
        """Forward and backward over rows of these lengths, with a label at so many places."""
        rows = list(lengths)
        seen = {window: sum(_pairs(row, window) for row in rows) for window in set(self.windows)}
        pairs = sum(seen[window] for window in self.windows)
        return self.token * sum(rows) + self.place * places + self.pair * pairs


def flops_of(model: nn.Module) -> ModelFlops:
    """Count a causal LM's numbers, with its adapters where it has some."""
    bare: Any = bare_model(model)
    config = bare.config.get_text_config()
    head = bare.get_output_embeddings()
    inside = set() if head is None else set(head.modules())
    token = place = 0.0
    for module in bare.modules():
        cost = _cost(module, _active(config))
        if module in inside:
            place += cost
        else:
            token += cost
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    # Two products of two operations forward, and four backward.
    return ModelFlops(token, place, 12.0 * heads * size, _windows(config))


def _cost(module: nn.Module, active: float) -> float:
    """Of what is the module's own, for one token."""
    if isinstance(module, nn.Embedding):
        return 0.0
    own = list(module.parameters(recurse=False))
    inputs, outputs = (getattr(module, name, None) for name in ("in_features", "out_features"))
    if isinstance(inputs, int) and isinstance(outputs, int) and own:
        # By its sizes: weights of four bits lie two in a byte.
        return float(inputs * outputs * _each(getattr(module, "weight", own[0])))
    flat = sum(p.numel() * _each(p) for p in own if p.dim() == 2)
    return flat + active * sum(p.numel() * _each(p) for p in own if p.dim() == 3)


def _each(weight: torch.Tensor) -> int:
    return 6 if weight.requires_grad else 4


def _active(config: Any) -> float:
    """Which share of a mixture's experts a token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return float(getattr(config, "num_experts_per_tok", None) or 1) / experts


def _windows(config: Any) -> tuple[int | None, ...]:
    layers = getattr(config, "num_hidden_layers", 0)
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _pairs(length: int, window: int | None) -> int:
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
