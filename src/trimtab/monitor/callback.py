"""`MonitorCallback`: ties progress, metrics, health and the watchdog to any Hugging Face or TRL trainer.

It reads what the trainer reports and never changes the training; it stops it in one case only, by `NonFiniteError`.
In a run of several processes the main one shows progress and writes metrics, and every one has a watchdog and checks
its gradients. The trainer's own display should be off (`disable_tqdm=True`, and `PrinterCallback` removed).

    with MonitorCallback(settings, run_dir, "cpu") as monitor:
        trainer = Trainer(..., callbacks=[monitor])
        trainer.train()

Leaving the `with` block (or calling `close()`) gives the terminal back and stops the watchdog when training fails.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from trimtab.config.schema import MonitorSettings
from trimtab.monitor.health import GradientCheck, NonFiniteError, Standing, check_logged
from trimtab.monitor.memory import gpu_busy_share
from trimtab.monitor.metrics import MetricsFile, phase_of
from trimtab.monitor.pace import Pace
from trimtab.monitor.progress import Figures, Quiet, make_progress
from trimtab.monitor.readings import Readings
from trimtab.monitor.watchdog import Watchdog
from trimtab.monitor.wording import count_of, duration, size

_SAVE_LINE_SECONDS = 60.0


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
        self.settings = settings
        self.run_dir = run_dir
        self.device = device
        self._console = console
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._readings = Readings(device, devices)
        self._progress: Quiet | None = None
        self._watchdog: Watchdog | None = None
        self._gradients: GradientCheck | None = None
        self._pace: Pace | None = None
        self._training = False
        self._announced = False
        self._timed = False
        self._warned = False
        self._good_loss: tuple[float, int] | None = None
        self._evaluated_batches = 0
        self._last_save_line = -math.inf

    def __enter__(self) -> MonitorCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print a line without damaging the bar."""
        (self._progress or make_progress("none", console=self._console)).say(text)

    def completions(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Completions of a step with their rewards (None: did not apply): shown, and kept in metrics.jsonl."""
        self._metrics.write(step, "completions", {"samples": samples})
        progress = self._progress or make_progress("none", console=self._console)
        for sample in samples:
            scores = ", ".join(
                f"{name} {'none' if value is None else f'{value:.3g}'}"
                for name, value in sample["rewards"].items()
            )
            asked, said = (repr(sample[key][-80:]) for key in ("prompt", "completion"))
            progress.note(f"step {step}: {asked} → {said} ({scores})")

    def close(self) -> None:
        """Stop watching and give the terminal back. May be called twice, and at any time."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        if self._progress is not None:
            self._progress.end()
        self._metrics.close()
        self._training = False
        atexit.unregister(self.close)

    # What the trainer calls, in the order of a run.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = self._attend(args, state, "the first batch", watch=True)
        atexit.register(self.close)
        self._training = True
        self._announced = self._timed = self._warned = False
        self._good_loss = None
        self._readings.begin()
        self._pace = Pace(state.global_step, state.max_steps)
        if self._gradients is not None:
            self._gradients.close()
        if self.settings.stop_on_nonfinite:
            self._gradients = GradientCheck(
                kwargs["model"],
                scaler=bool(args.fp16),
                watch_forward=not args.torch_compile,
                processes=args.world_size,
            )
        if state.is_world_process_zero:
            cut = self._metrics.begin(state.global_step)
            if state.global_step:
                gone = f"; {count_of(cut, 'line')} cut from metrics.jsonl" if cut else ""
                progress.note(f"going on after step {state.global_step} of {state.max_steps}{gone}")
        progress.begin(self._figures())

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._announce(self._attend(args, state, f"step {state.global_step + 1}"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = self._attend(args, state, f"step {state.global_step + 1}")
        self._announce(progress)
        progress.settle(self._figures())
        if self._gradients is not None:
            self._gradients.step_begins()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._attend(args, state, f"step {state.global_step + 1}")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._gradients is None:
            return
        groups = kwargs["optimizer"].param_groups
        standing = self._standing(state.global_step + 1, groups[0]["lr"] if groups else None)
        try:
            self._gradients.check(standing)
        except NonFiniteError as error:
            self._record_failure(state, error)
            raise

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = self._attend(args, state, f"the end of step {state.global_step}")
        pace = self._running_pace()
        pace.step_done(state.global_step)
        self._tell_first_step(progress, pace)
        progress.update(self._figures())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        values = dict(logs or {})
        phase = phase_of(values)
        progress = self._attend(args, state, f"after logging step {state.global_step}")
        if phase == "train" and self._pace is not None:
            # TRL counts in num_tokens; transformers does when include_num_input_tokens_seen is set.
            tokens = values.get("num_tokens") or state.num_input_tokens_seen or None
            counted = None if tokens is None else int(tokens)
            self._readings.take_in(values, counted, self._pace, processes=args.world_size)
        if state.is_world_process_zero:
            self._metrics.write(state.global_step, phase, values)
        if phase == "train" and self._pace is not None:
            figures = self._figures()
            progress.update(figures)
            progress.settle(figures)
            self._judge(values, args, state, progress)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = self._attend(args, state, "evaluation", watch=True)
        self._evaluated_batches += 1
        loader = kwargs["eval_dataloader"]
        progress.evaluating(self._evaluated_batches, len(loader) if has_length(loader) else None)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        progress = self._attend(args, state, "after the evaluation")
        self._evaluation_ends(progress)
        metrics = metrics or {}
        for name, value in metrics.items():
            if not name.endswith("_loss") or not isinstance(value, int | float):
                continue
            seconds = metrics.get(name.removesuffix("_loss") + "_runtime")
            took = f" ({duration(seconds)})" if seconds is not None else ""
            progress.note(f"evaluation after step {state.global_step}: {name} {value:.4g}{took}")
            if not math.isfinite(value):
                # Training itself may be sound, and stopping here would lose it: said, not stopped.
                progress.say(
                    f"warning: {name} is {value} after step {state.global_step}\n"
                    "  why: a held-out row without any label, or a forward pass that overflows; "
                    "the best checkpoint cannot be told by it\n"
                    "  change: look at the held-out rows (`data.eval_source`); with fp16, set `precision: bf16`"
                )

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._evaluation_ends(self._attend(args, state, "after a prediction"))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = self._attend(args, state, "after saving a checkpoint")
        took = self._pace.set_aside() if self._pace is not None else 0.0
        if not state.is_world_process_zero:
            return
        self._metrics.write(state.global_step, "save", {"checkpoint": f"checkpoint-{state.global_step}"})
        if time.monotonic() - self._last_save_line >= _SAVE_LINE_SECONDS:
            self._last_save_line = time.monotonic()
            progress.note(f"checkpoint-{state.global_step} saved ({duration(took)})")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        progress = self._attend(args, state, "the end of training")
        pace = self._running_pace()
        if not self._timed:
            self._tell_first_step(progress, pace, last=True)
        progress.settle(self._figures())
        progress.end()
        made = count_of(pace.step - pace.begin_step, "step")
        parts = [f"trained {made} in {duration(pace.elapsed)}"]
        read = self._readings
        if read.first_loss is not None and read.loss is not None:
            parts.append(f"loss {read.first_loss:.4g} → {read.loss:.4g}")
        parts.append(f"peak memory on {self.device} {size(read.peak_memory)}")
        progress.note("; ".join(parts))
        self.close()

    # What the events above are made of.

    def _attend(
        self, args: TrainingArguments, state: TrainerState, doing: str, *, watch: bool = False
    ) -> Quiet:
        """Tell the watchdog that the run is alive (`watch` wakes it); the first event makes what needs the rank."""
        if self._progress is None:
            self._progress = make_progress(
                self.settings.progress, console=self._console, main=state.is_world_process_zero
            )
        if self._watchdog is None:
            rank, several = args.process_index, args.world_size > 1
            say, prefix = self._progress.say, f"rank {rank}: " if several else ""
            self._watchdog = Watchdog(
                self.settings.slow_after_seconds,
                self.settings.stuck_after_seconds,
                lambda text: say(prefix + text),
                self.run_dir / (f"stacks-rank{rank}.txt" if rank else "stacks.txt"),
                gpu_busy=lambda: gpu_busy_share(self.device),
                processes=args.world_size,
            )
        if watch:
            self._watchdog.start()
        self._watchdog.beat(doing)
        return self._progress

    def _evaluation_ends(self, progress: Quiet) -> None:
        progress.evaluated()
        self._evaluated_batches = 0
        if self._training:
            self._running_pace().set_aside()
        elif self._watchdog is not None:
            self._watchdog.stop()

    def _running_pace(self) -> Pace:
        assert self._pace is not None, "the trainer reported a step before it reported the beginning"
        return self._pace

    def _figures(self) -> Figures:
        return self._readings.figures(self._running_pace())

    def _announce(self, progress: Quiet) -> None:
        if not self._announced:
            self._announced = True
            self._running_pace().first_begins()
            progress.note(f"first step on {self.device} …")

    def _tell_first_step(self, progress: Quiet, pace: Pace, *, last: bool = False) -> None:
        """Said once: when the second step has shown the pace, or when there is no second one."""
        if self._timed or pace.first_step_seconds is None:
            return
        text = f"first step on {self.device}: {duration(pace.first_step_seconds)}"
        if pace.seconds_a_step is not None:
            text += f"; then about {duration(pace.seconds_a_step)} a step"
            if pace.left:
                text += f" (about {duration(pace.left)} left)"
        elif not last:
            return
        self._timed = True
        progress.note(text)

    def _judge(
        self, values: dict[str, Any], args: TrainingArguments, state: TrainerState, progress: Quiet
    ) -> None:
        loss, norm = values.get("loss"), values.get("grad_norm")
        try:
            check_logged(
                loss,
                norm,
                self._standing(state.global_step, self._readings.learning_rate),
                scaler=bool(args.fp16),
            )
        except NonFiniteError as error:
            if self.settings.stop_on_nonfinite:
                self._record_failure(state, error)
                raise
            if not self._warned:
                self._warned = True
                progress.say(f"warning: {error}")
        if loss is not None and math.isfinite(loss):
            self._good_loss = (loss, state.global_step)

    def _standing(self, step: int, learning_rate: float | None) -> Standing:
        loss, at = self._good_loss if self._good_loss is not None else (None, None)
        return Standing(step, learning_rate, loss, at)

    def _record_failure(self, state: TrainerState, error: NonFiniteError) -> None:
        """The run ends here: its last metrics line says why, and the terminal is free for the message."""
        if state.is_world_process_zero:
            found = {"what": error.what, "parameters": error.parameters, "message": str(error)}
            self._metrics.write(error.step, "nonfinite", found)
        self.close()
