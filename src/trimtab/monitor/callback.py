"""`MonitorCallback`: the monitor of any Hugging Face or TRL trainer: from what it reports to what `Monitor` is told.

The trainer's own display should be off (`disable_tqdm=True`, and `PrinterCallback` removed).

    with MonitorCallback(settings, run_dir, "cpu") as monitor:
        trainer = Trainer(..., callbacks=[monitor])
        trainer.train()

Leaving the `with` block (or calling `close()`) gives the terminal back and stops the watchdog when training fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from trimtab.config.schema import MonitorSettings
from trimtab.monitor.core import Monitor
from trimtab.monitor.health import GradientCheck, NonFiniteError
from trimtab.monitor.metrics import phase_of


class MonitorCallback(TrainerCallback):
    """Shows, writes down and watches one run. `device` is the plan's, as a string such as `cpu` or `cuda:0`."""

    def __init__(
        self,
        settings: MonitorSettings,
        run_dir: Path,
        device: str,
        *,
        devices: Sequence[str] = (),
        console: Console | None = None,
    ) -> None:
        """`devices` are all that the process uses, where a model is split over several."""
        self._given = (settings, run_dir, device)
        self._more: dict[str, Any] = {"devices": devices, "console": console}
        self._announced = False
        self._evaluated_batches = 0

    @cached_property
    def _monitor(self) -> Monitor:
        """Made when it is first needed: by then the processes of the run have met."""
        met = dist.is_available() and dist.is_initialized()
        rank, processes = (dist.get_rank(), dist.get_world_size()) if met else (0, 1)
        return Monitor(*self._given, rank, processes, **self._more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print a line without damaging the bar."""
        self._monitor.say(text)

    def completions(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Completions of a step with their rewards (None: did not apply): shown, and kept in metrics.jsonl."""
        self._monitor.completions(step, samples)

    def close(self) -> None:
        """Stop watching and give the terminal back. May be called twice, and at any time."""
        self._monitor.close()

    # What the trainer calls, in the order of a run.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        monitor = self._monitor
        self._announced = False
        monitor.begin(state.global_step, state.max_steps)
        if monitor.gradients is not None:
            monitor.gradients.close()
        if monitor.settings.stop_on_nonfinite:
            monitor.gradients = GradientCheck(
                kwargs["model"],
                scaler=bool(args.fp16),
                watch_forward=not args.torch_compile,
                processes=args.world_size,
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.beat(f"step {state.global_step + 1}")
        if not self._announced:
            self._announced = True
            self._monitor.first_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_epoch_begin(args, state, control)
        self._monitor.settle()
        if self._monitor.gradients is not None:
            self._monitor.gradients.step_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.beat(f"step {state.global_step + 1}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        monitor = self._monitor
        if monitor.gradients is None:
            return
        groups = kwargs["optimizer"].param_groups
        try:
            rate = groups[0]["lr"] if groups else None
            monitor.gradients.check(monitor.standing(state.global_step + 1, rate))
        except NonFiniteError as error:
            monitor.failed(error)
            raise

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.beat(f"the end of step {state.global_step}")
        self._monitor.step_done(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        values = dict(logs or {})
        phase = phase_of(values)
        self._monitor.beat(f"after logging step {state.global_step}")
        if phase != "train":
            self._monitor.write(state.global_step, phase, values)
            return
        # TRL counts in num_tokens; transformers does when include_num_input_tokens_seen is set.
        tokens = values.get("num_tokens") or state.num_input_tokens_seen or None
        self._monitor.logged(state.global_step, values, None if tokens is None else int(tokens))
        self._monitor.judge(state.global_step, values, scaler=bool(args.fp16))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluated_batches += 1
        loader = kwargs["eval_dataloader"]
        self._monitor.evaluating(self._evaluated_batches, len(loader) if has_length(loader) else None)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._monitor.beat("after the evaluation")
        self._evaluated_batches = 0
        metrics = metrics or {}
        losses = {k: v for k, v in metrics.items() if k.endswith("_loss") and isinstance(v, int | float)}
        seconds = [metrics.get(name.removesuffix("_loss") + "_runtime") for name in losses]
        self._monitor.evaluated(state.global_step, losses, next(iter(seconds), None))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.beat("after saving a checkpoint")
        self._monitor.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.beat("the end of training")
        self._monitor.end()
