"""The trainer of voices: each part of the loss is a mean over its own tokens of a whole step, and all are logged.

A step is all passes of all processes: text and every codebook are counted over them before the first pass. Figures are
added up on the device and read when the trainer logs. It computes no cross-entropy: the model does (`voice_loss.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from transformers.trainer_utils import EvalLoopOutput

from trimtab.data.render import IGNORED
from trimtab.models.voice_loss import count_trained, parts_of, whole_of
from trimtab.models.voice_places import PLACES
from trimtab.placement import bare_model
from trimtab.recipes.late_trainer import LateTrainer

SCALE = 2.0**12
"""Where fp16's gradient scaler starts. The few trained words of a step have gradients near 1 each, which the usual
65536 takes to the edge of fp16; the smallest that matter, of one code among thousands, are well inside at this."""


class VoiceTrainer(LateTrainer):
    """A Trainer for a model that `teach_voice` has taught."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        model: Any = self.model
        self._shape = bare_model(model).config
        self._words = bare_model(model).text_lm_head is not None
        """Whether words are trained at all: a checkpoint may have no head for them."""
        # By this the trainer takes the loss for one that is counted over a whole step.
        self.model_accepts_loss_kwargs = True
        self._trained: torch.Tensor | None = None
        """(2, 1 + K): parts of the loss added up over steps since the last log, and how many steps had each part."""
        self._evaluated: torch.Tensor | None = None
        """(2, 1 + K): sums and counts of the evaluation that goes on."""

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        made: dict[str, Any] = super()._build_accelerator_args(**given)
        made["kwargs_handlers"] = [*made.get("kwargs_handlers", ()), GradScalerKwargs(init_scale=SCALE)]
        return made

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """(1 + K) trained tokens of a step: of text and of each codebook, over all its passes and processes."""
        if not batch_samples:
            return None
        counts = torch.stack([count_trained(batch, self._shape).to(device) for batch in batch_samples]).sum(0)
        counts[0] *= self._words
        return self.accelerator.reduce(counts, reduction="sum")

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        outputs = model(**inputs)
        of = outputs.counts if num_items_in_batch is None else num_items_in_batch
        parts = parts_of(outputs.sums, of)
        if model.training:
            self._take_in(parts.detach(), of)
        loss = whole_of(parts)
        if num_items_in_batch is not None:
            # The tokens are those of all processes; the gradients are averaged over the processes afterwards.
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _take_in(self, parts: torch.Tensor, of: torch.Tensor) -> None:
        """Of the passes of a step on one process the last one, and it alone, says that the step had them."""
        ends = self.accelerator.sync_gradients
        had = of.gt(0) if ends else torch.zeros_like(of)
        new = torch.stack([parts, had.to(parts.dtype)])
        self._trained = new if self._trained is None else self._trained + new

    def _figures(self) -> torch.Tensor | None:
        if self._trained is None:
            return None
        trained, self._trained = self._trained, None
        added: torch.Tensor = self.accelerator.reduce(trained, reduction="sum")
        return added.flatten()

    def _told(self, read: list[float]) -> dict[str, float]:
        added, steps = torch.tensor(read, dtype=torch.float64).view(2, -1).unbind()
        # Every process has counted the steps; the parts of all of them together are a step's.
        return figures(added * self.accelerator.num_processes, steps)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss of a whole set is that of all its tokens, not the mean of its batches' means."""
        self._evaluated = None
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if self._evaluated is not None:
            sums, counts = self.accelerator.reduce(self._evaluated, reduction="sum").unbind()
            told = {"loss": whole_of(parts_of(sums, counts)).item()} | figures(sums, counts)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in told.items()})
        return output

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs = dict(self._prepare_inputs(inputs))
        rows = len(inputs["input_ids"])
        own = self._own_rows(rows)
        if 0 < own < rows:
            for name in ("labels", "audio_labels"):
                inputs[name] = inputs[name].clone()
                inputs[name][own:] = IGNORED
            # They tell of all rows.
            inputs.pop(PLACES, None)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        # In double precision: a set may have millions of tokens.
        new = torch.stack([outputs.sums.double(), outputs.counts.double()]) * (own > 0)
        self._evaluated = new if self._evaluated is None else self._evaluated + new
        return outputs.loss, None, None

    def _own_rows(self, rows: int) -> int:
        """How many of a batch's rows count: several processes get the last batch filled up with rows of the first."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        before = rows * int(self.accelerator.process_index)
        return min(rows, max(0, int(state.remainder) - before))


def figures(sums: torch.Tensor, of: torch.Tensor) -> dict[str, float]:
    """The parts that there are, by the names that they are logged by."""
    counts, parts = of.tolist(), parts_of(sums, of).tolist()
    (words, text), *sounds = zip(counts, parts, strict=True)
    told = {"text_loss": text} if words else {}
    if any(count for count, _ in sounds):
        told["audio_loss"] = sum(part for _, part in sounds) / len(sounds)
    return told | {f"audio_loss_{book}": part for book, (count, part) in enumerate(sounds) if count}
