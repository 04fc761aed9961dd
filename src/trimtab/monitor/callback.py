"""`MonitorCallback`: the monitor of any Hugging Face or TRL trainer: from what it reports to what `Monitor` is told.

The trainer's own display should be off (`disable_tqdm=True`, and `PrinterCallback` removed).

    with MonitorCallback(settings, run_dir, "cpu") as monitor:
        trainer = Trainer(..., callbacks=[monitor])
        trainer.train()

Leaving the `with` block (or calling `close()`) gives the terminal back and stops the watchdog when training fails.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from trimtab.monitor.core import Monitor
from trimtab.monitor.health import GradientCheck, NonFiniteError
from trimtab.monitor.metrics import phase_of


class MonitorCallback(Monitor, TrainerCallback):
    """What the trainer calls, in the order of a run."""

    _announced = False
    _finite = True
    _evaluated_batches = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._announced = False
        self.begin(state.global_step, state.max_steps)
        if self.gradients is not None:
            self.gradients.close()
        if self.settings.stop_on_nonfinite or args.fp16:
            self.gradients = GradientCheck(
                kwargs["model"],
                scaler=bool(args.fp16),
                watch_forward=not args.torch_compile,
                processes=args.world_size,
                stop=self.settings.stop_on_nonfinite,
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat(f"step {state.global_step + 1}")
        if not self._announced:
            self._announced = True
            self.first_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_epoch_begin(args, state, control)
        self.settle()
        if self.gradients is not None:
            self.gradients.step_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat(f"step {state.global_step + 1}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.gradients is None:
            return
        groups = kwargs["optimizer"].param_groups
        try:
            rate = groups[0]["lr"] if groups else None
            self._finite = self.gradients.check(self.standing(state.global_step + 1, rate))
        except NonFiniteError as error:
            self.failed(error)
            raise

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        # A fused optimizer is called for a skipped step as well, so that Accelerate does not see it; of a sharded
        # model each process sees its own gradients alone.
        if args.fp16 and (not self._finite or getattr(optimizer, "step_was_skipped", False)):
            scaler = getattr(optimizer, "scaler", None)
            self.step_skipped(state.global_step + 1, None if scaler is None else scaler.get_scale())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat(f"the end of step {state.global_step}")
        self.step_done(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        values = dict(logs or {})
        phase = phase_of(values)
        self.beat(f"after logging step {state.global_step}")
        if phase != "train":
            self.write(state.global_step, phase, values)
            return
        # TRL counts in num_tokens; transformers does when include_num_input_tokens_seen is set.
        tokens = values.get("num_tokens") or state.num_input_tokens_seen or None
        if args.fp16:
            values["skipped_steps"] = self.skipped
        self.logged(state.global_step, values, None if tokens is None else int(tokens))
        self.judge(state.global_step, values, scaler=bool(args.fp16))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluated_batches += 1
        loader = kwargs["eval_dataloader"]
        self.evaluating(self._evaluated_batches, len(loader) if has_length(loader) else None)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.beat("after the evaluation")
        self._evaluated_batches = 0
        metrics = metrics or {}
        losses = {k: v for k, v in metrics.items() if k.endswith("_loss") and isinstance(v, int | float)}
        seconds = [metrics.get(name.removesuffix("_loss") + "_runtime") for name in losses]
        self.evaluated(state.global_step, losses, next(iter(seconds), None))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat("after saving a checkpoint")
        self.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat("the end of training")
        self.end()
