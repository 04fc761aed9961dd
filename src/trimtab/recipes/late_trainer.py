"""A trainer that logs what has arrived, and asks no device for it.

For recipes with figures of their own beside the loss: a subclass gives them as a tensor (`_figures`), and reads them
when they are on the host (`_told`), which on a GPU is a step later. It computes no loss and counts no tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from trimtab.recipes.late_logs import LateLogs
from trimtab.virtual.state import machine


class LateTrainer(Trainer):
    """Whoever saves, evaluates or ends reads first what is on its way."""

    def __init__(self, *, late: bool | None = None, **given: Any) -> None:
        """`late`: log a step in the next one also where nothing travels; None: on a GPU."""
        super().__init__(**given)
        self._late = late
        self._operations: int | None = None
        """Of a token, as the library reckons them."""

    @property
    def logs_late(self) -> bool:
        """Whether figures of a step may be logged in the next one."""
        return self._late if self._late is not None else self.args.device.type == "cuda" and machine() is None

    def floating_point_ops(self, inputs: Any) -> int:
        ids = inputs.get("input_ids")
        if ids is None:
            return int(super().floating_point_ops(inputs))
        if self._operations is None:
            # The library walks over all modules and weights for it, in every pass.
            self._operations = int(super().floating_point_ops(inputs)) // max(ids.numel(), 1)
        return self._operations * int(ids.numel())

    def _figures(self) -> torch.Tensor | None:
        """Numbers of the steps since the last log, of all processes, on their device; they are given once."""
        return None

    def _told(self, read: list[float]) -> dict[str, float]:
        """The same on the host, by the names that they are logged by."""
        return {}

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
        control = self.control
        if control.should_log and self.state.global_step > self._globalstep_last_logged:
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
        processes = self.accelerator.num_processes
        loss = self.accelerator.reduce(tr_loss.detach().clone(), reduction="sum")
        tr_loss.zero_()
        rate = self._get_learning_rate() if rate is None else rate
        # Of a sharded model each process has a part of the norm's tensor.
        norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        own = self._figures()
        sent = [loss, *([] if norm is None else [torch.as_tensor(norm)]), *(() if own is None else own)]

        def take(read: list[float]) -> None:
            mean, *rest = read
            self._total_loss_scalar += mean / processes
            logs: dict[str, float] = {"loss": mean / processes / steps}
            if norm is not None:
                logs["grad_norm"] = rest.pop(0)
            logs["learning_rate"] = rate
            self.log(logs | (self._told(rest) if own is not None else {}), start_time)

        self._logs.send([value.to(loss.device, non_blocking=True) for value in sent], take)

    @property
    def _logs(self) -> LateLogs:
        # The trainer makes its state anew when it begins to train.
        if getattr(self, "_logs_of", None) is not self.state:
            self._logs_of, self._logs_kept = self.state, LateLogs(self.state, late=self.logs_late)
        return self._logs_kept

    def flush_logs(self, before: int | None = None) -> None:
        """Log all that is on its way; with `before` only what belongs to earlier steps."""
        self._logs.flush(before=before)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.flush_logs()
        return super()._finalize_training(*args, **kwargs)
