"""On the CPU, TRL's fused LM head projects every position through the vocabulary, labelled or not.

This one projects only the positions that have a label: with the loss on answers that is about half of them, and the
head is a large part of a small model. Same outputs, same numbers; everywhere else TRL's own head stays in place.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

TILE = 2048
"""Positions whose logits are held at once; more are computed again in the backward pass."""


def use_sparse_head(model: Any, *, temperature: float = 1.0) -> bool:
    """Replace the fused head of `model` (a causal LM that a TRL trainer has prepared). False if it cannot."""
    config = model.config.get_text_config()
    reshaped = (
        "final_logit_softcapping",
        "logit_scale",
        "output_multiplier",
        "lm_head_multiplier",
        "logits_scaling",
    )
    if any(getattr(config, name, None) is not None for name in reshaped) or hasattr(config, "num_experts"):
        return False
    fused = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head or kwargs.get("labels") is None:
            return fused(*args, fused_lm_head=fused_lm_head, **kwargs)
        return _scored(self, args, kwargs, temperature)

    model.forward = types.MethodType(forward, model)
    return True


def _scored(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], temperature: float) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    labels = kwargs.pop("labels")[:, 1:]
    items = kwargs.pop("num_items_in_batch", None)
    kwargs["use_cache"] = False
    hidden = model.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    mask = labels != -100
    head = model.get_output_embeddings()
    picked, wanted = hidden[mask], labels[mask]
    tiles = [
        checkpoint(_tile, h, y, head, temperature, use_reentrant=False)
        if len(picked) > TILE
        else _tile(h, y, head, temperature)
        for h, y in zip(picked.split(TILE), wanted.split(TILE), strict=True)
    ]
    log_probs, entropy, top1 = (
        # Scattered from the selected values, so that a batch without labels still hangs on the graph.
        torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)
        for values in (torch.cat(column) for column in zip(*tiles, strict=True))
    )
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return FusedCausalLMOutput(loss=loss, log_probs=log_probs, entropy=entropy, is_top1=top1, label_mask=mask)


def _tile(
    hidden: torch.Tensor, labels: torch.Tensor, head: torch.nn.Module, temperature: float
) -> tuple[torch.Tensor, ...]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = -F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        top1 = (logits.argmax(-1) == labels).float()
    return log_probs, entropy, top1
