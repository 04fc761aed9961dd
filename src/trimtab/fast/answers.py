"""The loss at the places that have something to tell, without logits for the rest: what a batch's `head_rows` name.

A model's own forward is replaced by one that does what it did, unless it is given such places: then the hidden states
there go through the head, and loss, right tokens and entropy come back as sums on their device. Three ways, the first
that gives this model's own logits in a trial: a frozen head by `head_loss`; any other head in tiles that are computed
again in the backward pass; the model's own logits, with all that it does to them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.fast.head import Head, head_loss
from trimtab.fast.proof import ROUNDING, ROUNDING_HALF, short_rows, undisturbed
from trimtab.fast.rows import Means, marked
from trimtab.fast.whole_layers import pick_answers, picks_answers
from trimtab.placement import bare_model

TILE = 2048
"""Places whose logits are held at once."""
_TOKENS = ("input_ids", "position_ids")
"""What a batch has of each token."""
Way = Literal["frozen", "tiles", "own"]
Told = dict[str, torch.Tensor]


class Bent(NamedTuple):
    """What a model does to its logits, as its config tells."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Bent:
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        parted = float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale / parted, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def use_answers(model: Any, means: Means, *, plain: bool = False) -> Way:
    """Replace the forward of `model` (a causal LM, wrapped or not); says by which way the head goes. `plain`: by the
    model's own logits, whatever else it could be."""
    bare: Any = bare_model(model)
    way = "own" if plain else _way(bare, means)
    own = bare.forward

    # A method, for Accelerate wraps its function; `generate` reads the arguments that a model takes off its signature.
    @functools.wraps(getattr(own, "__func__", own))
    def forward(
        self: Any,
        *args: Any,
        head_rows: Any = None,
        head_labels: Any = None,
        computed: Any = None,
        **kwargs: Any,
    ) -> Any:
        if head_rows is None:
            return own(*args, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        kwargs = marked(self, kwargs) | {"use_cache": False}
        if computed is not None:
            kwargs |= {name: kwargs[name].index_select(1, computed) for name in _TOKENS if name in kwargs}
        if way == "own":
            return _from_logits(self, own, args, kwargs, head_rows, head_labels, count)
        if picks_answers(self):
            picked = self.base_model(*args, **kwargs, answer_rows=head_rows).last_hidden_state[0]
        else:
            picked = _picked(self.base_model(*args, **kwargs).last_hidden_state, head_rows)
        return self.get_output_embeddings()(picked, head_labels=head_labels.to(picked.device), count=count)

    bare.forward = types.MethodType(forward, bare)
    if way != "own" and means.tried:
        pick_answers(bare, means.device)
    if way != "own":
        _at_the_head(bare.get_output_embeddings(), way, Bent.of(bare.config.get_text_config()))
    return way


def _picked(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return values.flatten(0, 1).index_select(0, rows.to(values.device))


def _at_the_head(head: Any, way: Way, bent: Bent) -> None:
    """Have the loss made inside of the head's own call, once a pass: FSDP gathers its weight for that call alone."""
    own = head.forward

    @functools.wraps(getattr(own, "__func__", own))
    def forward(
        self: Any, hidden: Any, *args: Any, head_labels: Any = None, count: Any = None, **kwargs: Any
    ) -> Any:
        if head_labels is None:
            return own(hidden, *args, **kwargs)
        if way == "frozen":
            rows = torch.arange(len(hidden), device=hidden.device)
            made = Head(self.weight, self.bias, bent.scale, bent.softcap, self.__dict__.get("reordered"))
            return head_loss(hidden, made, head_labels, count=count, rows=rows)._asdict()
        tiles = [
            checkpoint(_tile, h, y, own, bent, use_reentrant=False)
            if len(hidden) > TILE
            else _tile(h, y, own, bent)
            for h, y in zip(hidden.split(TILE), head_labels.split(TILE), strict=True)
        ]
        return _sums(tiles, head_labels, count)

    head.forward = types.MethodType(forward, head)


def _tile(hidden: torch.Tensor, labels: torch.Tensor, head: Any, bent: Bent) -> tuple[torch.Tensor, ...]:
    return _facts(bent(head(hidden)), labels)


def _facts(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each place minus its log-probability, whether its token comes first, and the entropy."""
    logits = logits.float()
    labels = labels.to(logits.device)
    losses = F.cross_entropy(logits, labels, reduction="sum")
    with torch.no_grad():
        there = labels >= 0
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        right = (logits.argmax(-1) == labels) & there
        return losses, right.sum(), (entropy * there).sum()


def _sums(tiles: list[tuple[torch.Tensor, ...]], labels: torch.Tensor, count: Any) -> Told:
    losses, right, entropy = (torch.stack(column).sum() for column in zip(*tiles, strict=True))
    tokens = (labels >= 0).sum().to(losses.device)
    divisor = tokens.clamp(min=1) if count is None else count
    if isinstance(divisor, torch.Tensor):
        divisor = divisor.to(losses.device)
    return {"loss": losses / divisor, "tokens": tokens, "correct": right, "entropy": entropy}


def _from_logits(
    bare: Any,
    own: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: torch.Tensor,
    labels: torch.Tensor,
    count: Any,
) -> Told:
    """By the model's own forward, with all that it does to its logits and adds to its loss."""
    hook = None
    weight = _router_weight(bare)
    if weight:
        kwargs["output_router_logits"] = True
        kwargs["attention_mask"], hook = _mark_inside(bare, kwargs.get("attention_mask"))
    one = kwargs["input_ids"].shape[0] == 1 and "logits_to_keep" in inspect.signature(own).parameters
    try:
        outputs = own(*args, **kwargs, **({"logits_to_keep": rows} if one else {}))
    finally:
        if hook is not None:
            hook.remove()
    picked = outputs.logits[0] if one else _picked(outputs.logits, rows)
    told = _sums([_facts(picked, labels)], labels, count)
    # Of a model that has kept no router's logits it is a plain nought, or nothing.
    balanced = weight and isinstance(outputs.aux_loss, torch.Tensor)
    return told | {"aux_loss": weight * outputs.aux_loss} if balanced else told


def _mark_inside(bare: Any, mask: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
    """What a mixture of experts is told of its rows, and what puts attention's mark in again further down.

    The balance of the experts is made over all that a mask lets through, and the mark of rows that lie end to end, a
    mask without a column, is for attention alone: they have no padding.
    """
    if mask is None or mask.shape[-1]:
        return mask, None

    def put_in(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": mask}

    return None, bare.base_model.register_forward_pre_hook(put_in, with_kwargs=True)


def _router_weight(bare: Any) -> float:
    """How much the balance of a mixture's experts weighs in its loss; zero where there is none."""
    config = bare.config.get_text_config()
    return (
        float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
        if hasattr(config, "output_router_logits")
        else 0.0
    )


def _way(bare: Any, means: Means) -> Way:
    head = bare.get_output_embeddings()
    if head is None or _router_weight(bare):
        return "own"
    if means.tried and not _same_logits(bare, means, head):
        return "own"
    bare_head = type(head) is torch.nn.Linear and "forward" not in vars(head)
    return "frozen" if bare_head and not head._forward_hooks and not head._forward_pre_hooks else "tiles"


def _same_logits(bare: Any, means: Means, head: Any) -> bool:
    """Whether the head, and what the config tells, make of the hidden states the logits that the model itself does."""
    config = bare.config.get_text_config()
    inputs: Mapping[str, Any] = {"input_ids": torch.tensor([short_rows(config)[0]], device=means.device)}
    try:
        with undisturbed(bare), means.autocast():
            logits = bare(**inputs, use_cache=False).logits.float()
            hidden = bare.base_model(**inputs, use_cache=False).last_hidden_state
            ours = Bent.of(config)(head(hidden)).to(logits.device)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an architecture of any kind may fail by any error: then its own forward
        return False
    if ours.shape != logits.shape:
        return False
    half = means.half is not None or next(bare.parameters()).dtype in (torch.bfloat16, torch.float16)
    off = (ours - logits).abs().mean() / logits.abs().mean().clamp(min=1e-20)
    return bool(off < (ROUNDING_HALF / 5 if half else ROUNDING)) or not bool(logits.isfinite().all())
