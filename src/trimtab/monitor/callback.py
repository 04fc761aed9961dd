"""`MonitorCallback`: the monitor of any Hugging Face or TRL trainer: from what it reports to what `Monitor` is told.

The trainer's own display should be off (`disable_tqdm=True`, and `PrinterCallback` removed).

    with MonitorCallback(settings, run_dir, "cpu") as monitor:
        trainer = Trainer(..., callbacks=[monitor])
        trainer.train()

Leaving the `with` block (or calling `close()`) gives the terminal back and stops the watchdog when training fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from trimtab.monitor.core import Monitor
from trimtab.monitor.finite import GradientCheck
from trimtab.monitor.health import CHANGE_LOSS, Found, NonFiniteError
from trimtab.monitor.inquest import Scene, inquest
from trimtab.monitor.metrics import phase_of
from trimtab.monitor.moved import LOST, Moved
from trimtab.monitor.record import Pass, Recorder
from trimtab.monitor.verdict import History


class MonitorCallback(Monitor, TrainerCallback):
    """What the trainer calls, in the order of a run."""

    _announced = False
    _evaluated_batches = 0
    _recorder: Recorder | None = None
    _moved: Moved | None = None
    _optimizer: Any = None
    _about_to_step: int | None = None
    _trainer: Any = None

    def watch(self, trainer: Any) -> None:
        """Keep what each step of this trainer is made of, so that a bad one can be looked at."""
        self._recorder = Recorder(trainer)
        self._trainer = trainer

    @property
    def _logs_late(self) -> bool:
        """Whether the trainer logs a step when its figures have arrived, in the next one, and asks no device for it."""
        return bool(getattr(self._trainer, "logs_late", False))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._announced = False
        self.begin(state.global_step, state.max_steps)
        if self.gradients is not None:
            self.gradients.close()
        trained = [p for p in kwargs["model"].parameters() if p.requires_grad]
        self._moved = Moved(trained, args.learning_rate)
        if self.settings.stop_on_nonfinite or args.fp16:
            self.gradients = GradientCheck(
                kwargs["model"],
                scaler=bool(args.fp16),
                watch_forward=not args.torch_compile,
                processes=args.world_size,
                stop=self.settings.stop_on_nonfinite,
                recorder=self._recorder,
                on_skip=self._skipped,
            )
            self.growth = self.gradients.growth

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
        self._optimizer, self._about_to_step = kwargs["optimizer"], state.global_step + 1
        groups = self._optimizer.param_groups
        rate = groups[0]["lr"] if groups else None
        if self.gradients is not None:
            with self._explained():
                self.gradients.check(self.standing(state.global_step + 1, rate), self._optimizer)
        if self._moved is not None:
            self._moved.about_to_step(rate)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._about_to_step = None
        if self._moved is not None:
            self._moved.stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat(f"the end of step {state.global_step}")
        logs = control.should_log and not self._logs_late
        if logs or control.should_save or control.should_evaluate or control.should_training_stop:
            self._settle()
        self.step_done(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle()

    def _settle(self) -> None:
        """The device is asked now in any case; nothing is written of a step without its verdict."""
        if self.gradients is not None:
            with self._explained():
                self.gradients.settle()

    def _skipped(self, step: int) -> None:
        scaler = getattr(self._optimizer, "scaler", None)
        scale = None if scaler is None else scaler.get_scale()
        if scaler is not None and self._about_to_step == step:
            scale *= scaler.get_backoff_factor()  # it learns of the step when it skips it, in a moment
        self.step_skipped(step, scale)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A bad step ends the run here, on every process, with the reason that can be found."""
        try:
            yield
        except NonFiniteError as error:
            if hasattr(self._trainer, "flush_logs"):
                self._trainer.flush_logs(before=error.step)
            told = self.explain(error)
            self.failed(told)
            raise told from None

    def explain(self, error: NonFiniteError, again: Callable[[Pass], Any] | None = None) -> NonFiniteError:
        """The error with the module, the batch and the reason; every process calls it. `again` runs a pass again,
        where that is not a pass of training."""
        if self._recorder is None:
            return error
        self.beat("looking for the module that gave a number which is not finite")
        model, gradients = self._recorder.bare(), self.gradients
        growth = self.growth()
        if gradients is not None:
            gradients.close()
        history = History(
            error.step - 1 - self._pace.begin_step,
            self.losses,
            growth,
            error.standing.learning_rate,
            frozenset(name for name, p in model.named_parameters() if p.requires_grad),
        )
        scene = Scene(
            model,
            again or self._recorder.again,
            self._recorder.sharded,
            self._recorder.processor,
            history,
            self.run_dir,
        )
        return inquest(error, scene, *self._place)

    def bad_logits(self, step: int, own: bool, inputs: dict[str, Any], again: Callable[[Pass], Any]) -> None:
        """A generation met logits that are no numbers, on this process or on another: the run ends on all of them."""
        found = f"step {step}: the logits of a generation are NaN or infinite, and no token can be drawn from them"
        seen = torch.tensor(float("nan") if own else 0.0)
        record = Found([Pass(inputs, None, (torch.get_rng_state(), None), seen)], [seen.item()], None)
        standing = self.standing(step, self._readings.learning_rate)
        error = NonFiniteError(found, "not known", CHANGE_LOSS, standing, "logits", (), record)
        told = self.explain(error, again)
        self.failed(told)
        raise told

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
        flops = getattr(self._trainer, "flops_logged", None)
        self.logged(state.global_step, values, None if tokens is None else int(tokens), flops)
        moved = self._moved.read() if self._moved is not None else None
        if moved is not None and moved[0] < LOST:
            self.warn(
                self._course.stuck_weights(state.global_step, *moved, values.get("learning_rate") or 0.0)
            )
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
