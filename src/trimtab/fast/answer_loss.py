"""The loss of a model's answers, made at its head in chunks, in place of logits and the loss that is made of them.

While `asked` is open, the model's head takes the hidden states that it is given, and gives their loss as the one number
of its logits; the model's own loss function hands that number on. All else of the model runs as it is: whatever it does
with labels, masks and pictures before its head stays done. A model that does anything to its logits, or computes its
loss in another way, is found out by `proved`, with real rows, and keeps its own. It changes no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trimtab.fast.head import Head, HeadLoss, head_loss
from trimtab.models.outputs import loss_of
from trimtab.placement import bare_model

IGNORED = -100
_SHAPE = (1, 1, 1)
"""Of what stands for the logits."""


class Asked:
    """One pass: what its places have to tell, and what came of it."""

    def __init__(self, labels: torch.Tensor, rows: torch.Tensor | None) -> None:
        self.labels, self.rows = labels, rows
        self.found: HeadLoss | None = None
        self.stands: torch.Tensor | None = None
        self.handed_on = False


class AnswerLoss:
    """For one model whose head is a plain product."""

    def __init__(self, model: Any) -> None:
        self._model = bare_model(model)
        self._head: Any = plain_head(self._model)

    @contextmanager
    def asked(self, labels: torch.Tensor, rows: torch.Tensor | None = None) -> Iterator[Asked]:
        """Around a pass of the model. `labels` stand where they are told; `rows` are the places that have one, in the
        flattened labels, where that is known."""
        asked = Asked(labels, rows)
        # Of a split model accelerate's hook calls the forward that it found.
        name = "_old_forward" if "_old_forward" in vars(self._head) else "forward"
        with (
            _set(self._head, name, lambda hidden, *_, **__: self._told(asked, hidden)),
            _set(self._model, "_loss_function", lambda *args, **kwargs: _handed_on(asked, *args, **kwargs)),
        ):
            yield asked

    def _told(self, asked: Asked, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[:-1] != asked.labels.shape:
            raise ValueError(
                f"hidden states of {tuple(hidden.shape)} do not go with labels of {tuple(asked.labels.shape)}"
            )
        rows = None if asked.rows is None else asked.rows.to(hidden.device)
        head = Head(self._head.weight, self._head.bias)
        asked.found = head_loss(hidden, head, asked.labels.to(hidden.device), rows=rows)
        asked.stands = asked.found.loss.reshape(_SHAPE)
        return asked.stands


def _handed_on(asked: Asked, logits: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    # Anything that was done to the logits made another tensor of them.
    asked.handed_on = logits is asked.stands
    loss: torch.Tensor = logits.sum()
    return loss


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(module).get(name)
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        object.__delattr__(module, name)
        if own is not None:
            object.__setattr__(module, name, own)


def plain_head(model: Any) -> Any | None:
    """The head, where it is a product and nothing else: adapters and wrappers are modules of another class."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if type(head) is nn.Linear else None


def told_labels(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The labels of a batch as they are told: each by the place before it."""
    if "shift_labels" in inputs:
        found: torch.Tensor = inputs["shift_labels"]
        return found
    return nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)


def unproved(model: Any) -> AnswerLoss | str:
    """The same for a model that cannot be run yet (its shards have not met): by its parts alone.

    Each pass still tells whether its logits were handed on as they were (`Asked.handed_on`).
    """
    bare = bare_model(model)
    if plain_head(bare) is None:
        return "its head is adapted, or no plain product"
    if getattr(getattr(bare, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return "its loss is one of its own"
    return AnswerLoss(bare)


def proved(model: Any, inputs: Mapping[str, Any], rows: torch.Tensor | None = None) -> AnswerLoss | str:
    """The way for this model, tried on a small batch that lies where the model does; or why it keeps its own loss."""
    bare = bare_model(model)
    if plain_head(bare) is None:
        return "its head is adapted, or no plain product"
    if any(p.is_meta for p in bare.parameters()):
        return "its weights are not there yet, so nothing can be proved"
    made = AnswerLoss(bare)
    modes = [(module, module.training) for module in bare.modules()]
    bare.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            wanted = loss_of(bare(**inputs))
            with made.asked(told_labels(inputs), rows) as asked:
                ours = loss_of(bare(**inputs))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"its forward does not take it ({type(error).__name__}: {str(error).splitlines()[0]})"
    finally:
        for module, mode in modes:
            module.training = mode
    if not asked.handed_on:
        return "it changes its logits, or computes its loss in a way of its own"
    off = float((ours.to(wanted) - wanted).abs() / wanted.abs().clamp(min=1e-6))
    if not off <= (0.02 if bare.dtype in (torch.bfloat16, torch.float16) else 1e-3):
        return f"its own loss is another (by {off:.2%})"
    return made
