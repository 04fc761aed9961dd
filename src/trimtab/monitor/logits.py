"""Watches the logits of a generation: drawing a token from NaN ends in an assertion on the device, which hides the
cause and ends all use of it.

Rows whose logits are no numbers get level ones in their place, so that nothing is asserted, and it is noted on the
device; whoever asked for the tokens throws them away. It draws nothing, and sound logits pass as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class LogitsWatch(LogitsProcessor):
    """One generation's logits."""

    def __init__(self) -> None:
        self._bad: torch.Tensor | None = None
        self.inputs: dict[str, Any] = {}
        """What was asked and answered, as a forward pass takes it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Minus infinity is how another processor forbids a token; forbidding all is no answer either.
        bad = (scores.isnan() | scores.isposinf()).any(-1) | scores.isneginf().all(-1)
        self._bad = bad.any() if self._bad is None else self._bad | bad.any()
        return torch.where(bad[:, None], torch.zeros_like(scores), scores)

    def bad(self, device: torch.device) -> torch.Tensor:
        """1.0 where there were any, else 0.0; asks nothing."""
        return torch.zeros((), device=device) if self._bad is None else self._bad.to(device, torch.float32)

    @property
    def found(self) -> bool:
        """Whether there were any; asks the device."""
        return self._bad is not None and bool(self._bad.item())

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Around a call that makes this model generate."""
        generate = model.generate

        def watched(*args: Any, **kwargs: Any) -> Any:
            kwargs["logits_processor"] = LogitsProcessorList([*(kwargs.get("logits_processor") or ()), self])
            told = generate(*args, **kwargs)
            self.inputs = _whole(kwargs, told)
            return told

        own = vars(model).get("generate")
        model.generate = watched
        try:
            yield
        finally:
            if own is None:
                del model.generate
            else:
                model.generate = own


def _whole(given: Mapping[str, Any], told: Any) -> dict[str, Any]:
    """Prompts and what was drawn after them."""
    ids = told if isinstance(told, torch.Tensor) else told.sequences
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    mask = given.get("attention_mask")
    if mask is not None:
        tensors["attention_mask"] = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return tensors | {"input_ids": ids}
