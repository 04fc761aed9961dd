"""The trainer of supervised fine-tuning: rows as the collator lays them, the loss at the answers alone, late logs.

Everything that a step needs to know on the host (tokens, labels, their places) comes with the batch, so that the steady
loop asks the device for nothing. It knows nothing of devices: the plan and accelerate put things in their places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from trimtab.recipes.late_logs import LateLogs, wide
from trimtab.virtual.state import machine

_HOST = ("row_lengths", "tokens", "items")
"""What a batch says of itself and no model takes."""


class SftTrainer(Trainer):
    """A Trainer that counts on the host, and logs what has arrived."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # The loss is divided by the tokens of the whole step, over all processes and passes.
        self.model_accepts_loss_kwargs = True
        self._facts: dict[str, torch.Tensor] = {}
        """Sums of the passes since the last log, on their device."""
        self._held_out: dict[str, torch.Tensor] = {}
        self._tokens: torch.Tensor | int = 0
        """Of all processes, not yet counted in the state."""
        self._frozen_flops: int | None = None

    @property
    def logs_late(self) -> bool:
        """Whether figures of a step may be logged in the next one."""
        return self.args.device.type == "cuda" and machine() is None

    # One step

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        items, tokens = (sum(batch[name] for batch in batch_samples) for name in ("items", "tokens"))
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
        if self._frozen_flops is None:
            # The trainer would walk over all modules in every pass.
            model: Any = self.model
            self._frozen_flops = 6 * model.num_parameters(exclude_embeddings=True)
        return int(self._frozen_flops * inputs["input_ids"].numel())

    # What is logged

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        control, state = self.control, self.state
        if control.should_log and state.global_step > self._globalstep_last_logged:
            self._send_log(tr_loss, grad_norm, start_time, learning_rate)
        control.should_log = False
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.flush_logs()
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
        )

    def _send_log(self, tr_loss: torch.Tensor, grad_norm: Any, start_time: float, rate: float | None) -> None:
        steps = self.state.global_step - self._globalstep_last_logged
        self._globalstep_last_logged = self.state.global_step
        names, sums = list(self._facts), [tr_loss.detach().clone(), *self._facts.values()]
        tr_loss.zero_()
        self._facts = {}
        if self.args.world_size > 1:
            together = torch.stack([value.to(tr_loss.device, wide(tr_loss.device)) for value in sums])
            dist.all_reduce(together)
            sums = list(together.unbind())
        rate = self._get_learning_rate() if rate is None else rate
        norm = None if grad_norm is None else torch.as_tensor(_whole(grad_norm))
        tokens, self._tokens = self._tokens, 0
        sent = [*sums, *([] if norm is None else [norm])]
        if isinstance(tokens, torch.Tensor):
            sent.append(tokens)

        def take(read: list[float]) -> None:
            loss, facts = read[0] / self.args.world_size, dict(zip(names, read[1:], strict=False))
            self._total_loss_scalar += loss
            logs: dict[str, float] = {"loss": loss / steps}
            if norm is not None:
                logs["grad_norm"] = read[len(sums)]
            logs["learning_rate"] = rate
            self.state.num_input_tokens_seen += int(read[-1] if isinstance(tokens, torch.Tensor) else tokens)
            logs |= self._shares(facts)
            self.log(logs, start_time)

        home = tr_loss.device
        self._logs.send([value.to(home, non_blocking=True) for value in sent], take)

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

    @property
    def _logs(self) -> LateLogs:
        # The trainer makes its state anew when it begins to train.
        if getattr(self, "_logs_of", None) is not self.state:
            self._logs_of, self._logs_kept = self.state, LateLogs(self.state, late=self.logs_late)
        return self._logs_kept

    def flush_logs(self, before: int | None = None) -> None:
        """Log all that is on its way; with `before` only what belongs to earlier steps."""
        self._logs.flush(before=before)

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
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            with contextlib.suppress(
                RuntimeError
            ):  # the device itself may have failed; the error that came is told
                self.flush_logs()
            raise

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # What was trained on since the last log belongs to the checkpoint as well.
        self.state.num_input_tokens_seen += int(self._tokens)
        self._tokens = 0
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.flush_logs()
        return super()._finalize_training(*args, **kwargs)


def _whole(norm: Any) -> Any:
    """Of a sharded model each process has a part of the norm's tensor."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
