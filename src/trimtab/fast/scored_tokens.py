"""TRL's fused head, for a head that nobody trains: log-probabilities by `logprobs.py`, with TRL's outputs.

TRL's own computes the logits of every row a second time in the backward pass. Where the head is trained, adapted or
sharded, where experts' balance is part of the loss, or where the first rows do not come out as the model's own logits
say, TRL's stays in place. It changes no weight, and the model without TRL's flag is as it was.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from trimtab.fast.logprobs import token_logprobs
from trimtab.models.load import shapes_only

_TOKENS = (2, 8)
"""Rows and columns that the proof looks at."""
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


def use_frozen_head(model: Any, *, temperature: float = 1.0) -> str | None:
    """Compute the log-probabilities of a causal LM that a TRL trainer has prepared. None, or why TRL's own stays."""
    head = model.get_output_embeddings()
    if not _is_frozen(head):
        return "its head is trained, adapted or sharded"
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        return "its loss weighs how its experts are used"
    fused, bends = model.forward, logit_shape(model.config)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        plain = kwargs.get("labels") is None or kwargs.get("shift_labels") is not None
        if not fused_lm_head or plain or kwargs.get("output_router_logits") or not _is_frozen(head):
            return fused(*args, fused_lm_head=fused_lm_head, **kwargs)
        return _scored(self, args, kwargs, temperature, bends)

    model.forward = types.MethodType(forward, model)
    why = _differs(model, temperature)
    if why is not None:
        model.forward = fused
    return why


def logit_shape(config: Any) -> tuple[float, float | None]:
    """What a model's config says is done to the head's product: a factor, and a softcap behind it."""
    text = config.get_text_config()
    factor = next((found for name in _FACTORS if (found := getattr(text, name, None)) is not None), None)
    if factor is None:
        divisor = next((found for name in _DIVISORS if (found := getattr(text, name, None)) is not None), 1.0)
        factor = 1.0 / divisor
    softcap = getattr(text, "final_logit_softcapping", None)
    return float(factor), None if softcap is None else float(softcap)


def _is_frozen(head: Any) -> bool:
    """A plain product by a weight that is whole here and gets no gradient; adapters are modules of another class."""
    if type(head) is not nn.Linear or hasattr(head.weight, "full_tensor"):
        return False
    return not any(p.requires_grad for p in head.parameters())


def _scored(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    temperature: float,
    bends: tuple[float, float | None],
) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    labels = kwargs.pop("labels")[:, 1:]
    items = kwargs.pop("num_items_in_batch", None)
    kwargs["use_cache"] = False
    hidden = model.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    head = model.get_output_embeddings()
    hidden, labels = hidden.to(head.weight.device), labels.to(head.weight.device)
    mask = labels != -100
    # The only wait: rows behind the end of a completion are often most of them, and go through no head.
    places = mask.flatten().nonzero()[:, 0]
    picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
    found = token_logprobs(
        picked,
        head.weight,
        labels.flatten().index_select(0, places),
        bias=head.bias,
        scale=bends[0],
        softcap=bends[1],
        temperature=temperature,
    )
    log_probs, entropy = (
        # Put into place from the values, so that a batch without labels still hangs on the graph.
        values.new_zeros(mask.numel()).index_copy(0, places, values).view(mask.shape)
        for values in found
    )
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return FusedCausalLMOutput(loss=loss, log_probs=log_probs, entropy=entropy, label_mask=mask)


def _differs(model: Any, temperature: float) -> str | None:
    """Whether a few tokens get other log-probabilities than the model's own logits give them, and by how much."""
    if shapes_only():
        return None
    where = model.get_input_embeddings().weight.device
    if where.type == "meta":
        return "its weights are not there yet, so nothing can be proved"
    rows, columns = _TOKENS
    size = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(1, rows * columns + 1, device=where) * 7919 % size).view(rows, columns)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            ours = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / temperature
    finally:
        for module, mode in modes:
            module.training = mode
    wanted = logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(logits.device))[..., 0]
    off = float((ours.to(wanted) - wanted).abs().max())
    half = model.dtype in (torch.bfloat16, torch.float16)
    if not off <= (0.1 if half else 1e-3):
        return f"its log-probabilities are not those of a head behind its body (off by {off:.2g})"
    return None
