"""The trainer of supervised fine-tuning: rows as the collator lays them, the loss at the answers alone, late logs.

Everything that a step needs to know on the host (tokens, labels, their places) comes with the batch, so that the steady
loop asks the device for nothing. It knows nothing of devices: the plan and accelerate put things in their places.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trimtab.models.flops import ModelFlops, flops_of
from trimtab.monitor.health import NonFiniteError
from trimtab.recipes.late_logs import wide
from trimtab.recipes.late_trainer import LateTrainer

_HOST = ("row_lengths", "lengths", "tokens", "items")
"""What a batch says of itself and no model takes."""


class SftTrainer(LateTrainer):
    """A trainer that counts on the host, and logs what has arrived."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # The loss is divided by the tokens of the whole step, over all processes and passes.
        self.model_accepts_loss_kwargs = True
        self._facts: dict[str, torch.Tensor] = {}
        """Sums of the passes since the last log, on their device."""
        self._held_out: dict[str, torch.Tensor] = {}
        self._tokens: torch.Tensor | int = 0
        """Of all processes, not yet counted in the state."""
        self._sent: deque[tuple[list[str], int | None, float]] = deque()
        """Of each log on its way: what its figures are, its tokens where the host counts them, and its operations."""
        self._flops: ModelFlops | None = None
        self._flops_done = 0.0
        self.flops_logged: float | None = None
        """Operations that this process's rows needed since it began to train, up to the last logged step."""

    # One step

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        items, tokens = (sum(batch[name] for batch in batch_samples) for name in ("items", "tokens"))
        if self._flops is None:
            self._flops = flops_of(self.accelerator.unwrap_model(self.model))
        self._flops_done += sum(self._flops.of(batch["lengths"], batch["items"]) for batch in batch_samples)
        if self.args.world_size == 1:
            self._tokens += tokens
            return max(items, 1)
        both = torch.tensor([items, tokens]).to(device, non_blocking=True)
        dist.all_reduce(both)
        self._tokens = self._tokens + both[1]
        return both[0].clamp(min=1)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        given = {name: value for name, value in inputs.items() if name not in (*_HOST, "labels")}
        told = model(**given, num_items_in_batch=num_items_in_batch)
        loss = told["loss"]
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The tokens are those of all processes; the gradients are averaged over the processes afterwards.
            loss = loss * self.accelerator.num_processes
        if "aux_loss" in told:
            passes = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + told["aux_loss"] / passes
        self._note(self._facts if model.training else self._held_out, told)
        return (loss, told) if return_outputs else loss

    def _note(self, sums: dict[str, torch.Tensor], told: Mapping[str, torch.Tensor]) -> None:
        for name in ("tokens", "correct", "entropy", "aux_loss"):
            if name in told:
                value = told[name].detach().float()
                sums[name] = sums[name] + value if name in sums else value
        if "aux_loss" in told:
            one = torch.ones_like(told["tokens"])
            sums["passes"] = sums["passes"] + one if "passes" in sums else one

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def floating_point_ops(self, inputs: Any) -> int:
        # The trainer would walk over all modules in every pass.
        return 0 if self._flops is None else int(self._flops.of(inputs["lengths"], inputs["items"]))

    # What is logged

    def _figures(self) -> torch.Tensor:
        values = {"tokens": torch.zeros((), device=self.args.device), **self._facts}
        names, self._facts = list(values), {}
        home = self.args.device
        figures = torch.stack([value.to(home, wide(home), non_blocking=True) for value in values.values()])
        if self.args.world_size > 1:
            dist.all_reduce(figures)
        tokens, self._tokens = self._tokens, 0
        self._sent.append((names, tokens if isinstance(tokens, int) else None, self._flops_done))
        return figures if isinstance(tokens, int) else torch.cat([figures, tokens.to(figures.dtype)[None]])

    def _told(self, read: list[float]) -> dict[str, float]:
        names, tokens, self.flops_logged = self._sent.popleft()
        self.state.num_input_tokens_seen += int(read[-1]) if tokens is None else tokens
        return self._shares(dict(zip(names, read, strict=False)))

    def _shares(self, facts: Mapping[str, float]) -> dict[str, float]:
        counted = max(facts.get("tokens", 0.0), 1.0)
        told = {
            "entropy": facts.get("entropy", 0.0) / counted,
            "num_tokens": self.state.num_input_tokens_seen,
            "mean_token_accuracy": facts.get("correct", 0.0) / counted,
        }
        if "aux_loss" in facts:
            told["aux_loss"] = facts["aux_loss"] / max(facts["passes"], 1.0)
        return told

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._held_out and any(name.startswith("eval_") for name in logs):
            together = torch.stack([value.to(self.args.device) for value in self._held_out.values()])
            if self.args.world_size > 1:
                dist.all_reduce(together)
            facts = dict(zip(self._held_out, together.tolist(), strict=True))
            self._held_out = {}
            logs.update({f"eval_{name}": value for name, value in self._shares(facts).items()})
        super().log(logs, start_time)

    # Beginning and end

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._facts, self._tokens = {}, 0
        self._flops_done, self.flops_logged = 0.0, None
        self._sent.clear()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            # The device itself may have failed; the error that came is told.
            with contextlib.suppress(RuntimeError, NonFiniteError):
                self.flush_logs()
            raise

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # What was trained on since the last log belongs to the checkpoint as well.
        self.state.num_input_tokens_seen += int(self._tokens)
        self._tokens = 0
        super()._save_checkpoint(model, trial)
