"""The trainer of pictures: the loss is found in whatever a model returns; the head works on the answers alone.

Batches come from the collator whole. It knows nothing of devices: the plan and accelerate put things in their places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trimtab.data.render import IGNORED
from trimtab.fast.answer_loss import AnswerLoss, told_labels
from trimtab.models.diffusion import MaskedDiffusion
from trimtab.models.outputs import loss_in_step, loss_of
from trimtab.placement import bare_model, on_several_devices
from trimtab.recipes.late_trainer import LateTrainer

Batch = dict[str, Any]
ROWS = "answer_rows"
"""The entry of a batch that tells the places with a label in its flattened `shift_labels`; no model is given it."""


class PictureTrainer(LateTrainer):
    """A Trainer that takes what a model returns as it comes, counted over all processes and passes of a step."""

    def __init__(
        self, *, objective: MaskedDiffusion | None = None, answers: AnswerLoss | None = None, **given: Any
    ) -> None:
        """`objective` in place of the model's own loss; `answers`: the way to it that was proved for this model."""
        super().__init__(**given)
        self._objective, self._answers = objective, answers
        self._more = without_cache(self.model)
        # Have the trainer count each step's tokens: some models (Qwen's) say that they do not count, and none is asked.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        given = {name: value for name, value in inputs.items() if name != ROWS} | self._more
        if self._objective is not None:
            loss, outputs = self._masked_loss(model, given, num_items_in_batch)
        else:
            loss, outputs = self._answers_loss(model, given, inputs.get(ROWS), num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The tokens are those of all processes; the gradients are averaged over the processes afterwards.
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _answers_loss(self, model: Any, given: Batch, rows: torch.Tensor | None, of: Any) -> tuple[Any, Any]:
        if self._answers is None:
            outputs = model(**given)
            if of is None:
                return loss_of(outputs), outputs
            some = None if rows is None else len(rows) > 0
            return loss_in_step(outputs, trained_tokens(given), of, some=some), outputs
        with self._answers.asked(told_labels(given), rows) as asked:
            outputs = model(**given)
        if asked.found is None or not asked.handed_on:
            # Only where nothing could be tried before: the model's own loss, from now on.
            self._answers = None
            return self._answers_loss(model, given, rows, of)
        # Of no tokens it is nought, with a graph.
        mean = loss_of(outputs)
        return mean if of is None else mean * (asked.found.tokens / of), outputs

    def _masked_loss(self, model: Any, given: Batch, of: Any) -> tuple[Any, Any]:
        assert self._objective is not None
        # An evaluation masks a row alike every time, so that its losses can be compared.
        masked = self._objective.inputs(given, self.state.global_step if model.training else None)
        if self._answers is None:
            with self._objective.pictures_once():
                outputs = model(**masked.inputs)
            return self._objective.loss(outputs.logits, masked.targets, of)[0], outputs
        with self._objective.pictures_once(), self._answers.asked(masked.targets) as asked:
            outputs = model(**masked.inputs)
        assert asked.found is not None
        mean = outputs.logits.reshape(())
        return mean if of is None else mean * (asked.found.tokens / of), outputs


def without_cache(model: Any) -> Batch:
    """What tells the model to keep no cache of a pass: some read it off their text's config, where it is on."""
    bare = bare_model(model)
    ours = type(bare).__module__.startswith("transformers.")
    takes = inspect.signature(bare.forward).parameters.values()
    told = any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in takes)
    return {"use_cache": False} if ours and told else {}


def trained_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """Where a batch has tokens that are trained on: each is told by the one before it, so never the first of a row."""
    labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:]
    return torch.ne(labels, IGNORED)


class AnswersAlone:
    """A collator's batches, with the places of the answers: of a picture's hundreds of tokens no logits are needed."""

    def __init__(
        self,
        collate: Callable[[Sequence[Any]], Batch],
        *,
        from_the_end: bool = False,
        numbered: bool = False,
    ) -> None:
        """`from_the_end`: tell a number of last places, which needs no device; a split model's head has its own.
        `numbered`: tell the trainer which of the places have a label, so that it need not ask the device."""
        self.collate, self._from_the_end, self._numbered = collate, from_the_end, numbered

    def __call__(self, rows: Sequence[Any]) -> Batch:
        batch = self.collate(rows)
        ahead = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        # At least one place, so that a batch without any answer fails by its loss and not by an empty shape.
        places = (ahead != IGNORED).any(0).nonzero().flatten()
        places = places if len(places) else torch.zeros(1, dtype=torch.long)
        if self._from_the_end:
            first, width = int(places[0]), ahead.shape[1]
            batch |= {"logits_to_keep": width - first, "shift_labels": ahead[:, first:].contiguous()}
        else:
            batch |= {"logits_to_keep": places, "shift_labels": ahead[:, places].contiguous()}
        if self._numbered:
            batch[ROWS] = batch["shift_labels"].flatten().ne(IGNORED).nonzero().flatten()
        return batch


def answers_alone(
    model: Any, collate: Callable[[Sequence[Any]], Batch], *, numbered: bool = False
) -> Callable[[Sequence[Any]], Batch]:
    """The collator that fits the model: some take the places of the wanted logits, a model of one's own may not."""
    bare = bare_model(model)
    takes = "logits_to_keep" in inspect.signature(bare.forward).parameters
    ours = type(bare).__module__.startswith("transformers.")
    if not (takes and ours):
        return collate
    return AnswersAlone(collate, from_the_end=on_several_devices(bare), numbered=numbered)
