"""`Monitor`: shows, writes down and watches one run; whoever trains (a trainer or a loop of our own) says what it did.

In a run of several processes the main one shows progress and writes metrics, and every one has a watchdog. It never
changes the training; it stops it in one case only, by `NonFiniteError`. Leaving its context gives the terminal back and
stops the watchdog, also when training fails.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from rich.console import Console

from trimtab.config.schema import MonitorSettings
from trimtab.monitor.board import Board
from trimtab.monitor.course import Course, Warned
from trimtab.monitor.finite import GradientCheck
from trimtab.monitor.health import NonFiniteError, Standing, check_logged
from trimtab.monitor.memory import gpu_busy_share
from trimtab.monitor.metrics import MetricsFile
from trimtab.monitor.pace import Pace
from trimtab.monitor.progress import Quiet, make_progress
from trimtab.monitor.readings import Readings
from trimtab.monitor.watchdog import Watchdog, current
from trimtab.monitor.wording import count_of, duration, size

_SAVE_LINE_SECONDS = 60.0


def watchdog_for(
    settings: MonitorSettings,
    run_dir: Path,
    rank: int,
    processes: int,
    board: Board | None,
    say: Callable[[str], None] = print,
) -> Watchdog:
    """A watchdog as the settings ask for it."""
    return Watchdog(
        settings.slow_after_seconds,
        settings.stuck_after_seconds,
        say,
        run_dir / (f"stacks-rank{rank}.txt" if rank else "stacks.txt"),
        processes=processes,
        start_after=settings.start_stuck_after_seconds,
        board=board,
        stop=settings.on_stuck == "stop",
    )


class Monitor:
    """One run's progress, metrics, memory, health and watchdog, from its beginning to its end."""

    def __init__(
        self,
        settings: MonitorSettings,
        run_dir: Path,
        device: str,
        rank: int | None = None,
        processes: int = 1,
        *,
        devices: Sequence[str] = (),
        console: Console | None = None,
    ) -> None:
        """`device` is the plan's, such as `cpu` or `cuda:0`; `devices` are all that a split model is spread over.

        Without `rank` it is asked for at the first event: by then the processes of a run have met.
        """
        self.settings = settings
        self.run_dir = run_dir
        self.device = device
        self.gradients: GradientCheck | None = None
        self.skipped = 0
        """Steps, also those before a resume, that an fp16 gradient scaler has skipped."""
        self.warnings: list[dict[str, Any]] = []
        """What was warned of, also before a resume; in the summary too."""
        self.losses: list[float] = []
        """Those that were logged since training began, and finite."""
        self.growth: Callable[[], float | None] = lambda: None
        """How many times larger the trained weights are than when training began; asks the device."""
        self._course = Course(lambda: self.growth())
        self._given = None if rank is None else (rank, processes)
        self._console = console
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._readings = Readings(device, devices)
        self._pace = Pace(0, 0)
        self._training = self._timed = self._warned = False
        self._good_loss: tuple[float, int] | None = None
        self._last_save_line = -math.inf
        self._own_watchdog = False

    @cached_property
    def _place(self) -> tuple[int, int]:
        """This process's rank, and how many there are."""
        if self._given is None and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._given or (0, 1)

    @cached_property
    def _progress(self) -> Quiet:
        return make_progress(self.settings.progress, console=self._console, main=self._place[0] == 0)

    @cached_property
    def _watchdog(self) -> Watchdog:
        """The one that watches this process from its start, where there is one; else the monitor's own."""
        rank, processes = self._place
        watchdog = current()
        if watchdog is None:
            board = Board(self.run_dir, rank, processes) if processes > 1 else None
            watchdog = watchdog_for(self.settings, self.run_dir, rank, processes, board)
            self._own_watchdog = True
        watchdog.say = lambda text: self.say(f"rank {rank}: {text}" if processes > 1 else text)
        watchdog.gpu_busy = lambda: gpu_busy_share(self.device)
        return watchdog

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print a line that matters, without damaging the bar."""
        self._progress.say(text)

    def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """A line in metrics.jsonl, by the main process alone."""
        if self._place[0] == 0:
            if not self._readings.timed:
                # A trainer reckons speeds of its own, for an evaluation and at the end.
                values = {name: value for name, value in values.items() if not name.endswith("_per_second")}
            self._metrics.write(step, phase, values)

    def beat(self, doing: str) -> None:
        """Something got done; `doing` names what comes next."""
        self._watchdog.beat(doing)

    def begin(self, step: int, total: int) -> None:
        """Training begins after `step`; metrics of abandoned later steps are cut."""
        atexit.register(self.close)
        self._watchdog.start()
        self._watchdog.settled(False)
        self._watchdog.step, self._watchdog.planned_steps = step, total
        if self._watchdog.board is not None:
            self._watchdog.board.tell(step=step)
        self.beat("the first batch")
        self._training, self._timed, self._warned, self._good_loss = True, False, False, None
        self._readings.begin()
        self._pace = Pace(step, total)
        self.skipped = 0
        self.warnings, self.losses = [], []
        if self._place[0] == 0:
            cut = self._metrics.begin(step)
            self.warnings = self._metrics.of_phase("warning")
            self.skipped = self._readings.skipped = self._metrics.count("skip")
            if step:
                gone = f"; {count_of(cut, 'line')} cut from metrics.jsonl" if cut else ""
                self._progress.note(f"going on after step {step} of {total}{gone}")
        self._course.begin(step, {warned["kind"] for warned in self.warnings})
        self._progress.begin(self._readings.figures(self._pace))

    def first_begins(self) -> None:
        """The first step begins: whatever came before it was no training."""
        self._pace.first_begins()
        self._progress.note(f"first step on {self.device} …")

    def step_done(self, step: int) -> None:
        """A step is done; its figures may follow, by `logged`."""
        self._pace.step_done(step)
        self._watchdog.step = step
        self._watchdog.settled()
        self._time_first_step()
        self._progress.update(self._readings.figures(self._pace))

    def step_skipped(self, step: int, scale: float | None) -> None:
        """The fp16 scaler met an infinite gradient and left the weights alone; `scale` is what it goes on with."""
        self.skipped += 1
        self._readings.skipped = self.skipped
        self.write(step, "skip", {"scale": scale})
        if self.skipped == 1:
            on = "" if scale is None else f", and the scaler goes on with a scale of {scale:g}"
            self._progress.note(f"step {step} skipped: a gradient overflowed in fp16{on}")

    def settle(self) -> None:
        """Nothing more will be said about the last step."""
        self._progress.settle(self._readings.figures(self._pace))

    def logged(
        self, step: int, values: dict[str, Any], tokens: int | None = None, flops: float | None = None
    ) -> None:
        """The figures of the steps since the last log: ours are added to them, and all are written and shown.

        Every process has to call it. `tokens` counts from the start of the run, `flops` from that of this training.
        """
        self._readings.take_in(values, tokens, self._pace, processes=self._place[1], flops=flops)
        self.write(step, "train", values)
        if isinstance(loss := values.get("loss"), float) and math.isfinite(loss):
            self.losses.append(loss)
        self._progress.update(self._readings.figures(self._pace))
        self.settle()
        self.warn(self._course.logged(step, values))

    def warn(self, warnings: Sequence[Warned]) -> None:
        """Say it once, loudly, and keep it: in metrics.jsonl and, at the end, in the summary."""
        if self._place[0] != 0 or not self._readings.computed:
            return
        for warned in warnings:
            told = {"kind": warned.kind, "message": warned.text().removeprefix("warning: ")}
            self.warnings.append({"step": warned.step} | told)
            self.write(warned.step, "warning", told)
            self.say(warned.text())

    def judge(self, step: int, values: Mapping[str, Any], *, scaler: bool) -> None:
        """Stop at a logged loss or gradient norm that is not finite, or warn once where the run is to go on."""
        loss = values.get("loss")
        try:
            standing = self.standing(step, self._readings.learning_rate)
            check_logged(loss, values.get("grad_norm"), standing, scaler=scaler)
        except NonFiniteError as error:
            if self.settings.stop_on_nonfinite:
                self.failed(error)
                raise
            if not self._warned:
                self._warned = True
                self.say(f"warning: {error}")
        if loss is not None and math.isfinite(loss):
            self._good_loss = (loss, step)

    def standing(self, step: int, learning_rate: float | None) -> Standing:
        """Where the run stands, for a message."""
        return Standing(step, learning_rate, *(self._good_loss or (None, None)))

    def failed(self, error: NonFiniteError) -> None:
        """The run ends here: its last metrics line says why, and the terminal is free for the message."""
        found = {"what": error.what, "parameters": error.parameters, "message": str(error)}
        self.write(error.step, "nonfinite", found)
        self.close()

    def evaluating(self, done: int, total: int | None) -> None:
        """So many batches of an evaluation are done."""
        self._watchdog.start()
        self.beat("evaluation")
        self._progress.evaluating(done, total)

    def evaluated(self, step: int, figures: Mapping[str, float], seconds: float | None = None) -> None:
        """An evaluation is over; `seconds` is how long it took, where the caller knows."""
        self._progress.evaluated()
        took = self._pace.set_aside() if self._training else None
        if not self._training and self._own_watchdog:
            self._watchdog.stop()
        took = took if seconds is None else seconds
        if not figures:
            return
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._progress.note(
            f"evaluation after step {step}: {shown}" + (f" ({duration(took)})" if took is not None else "")
        )
        self.warn(self._course.evaluated(step, figures.get("eval_loss", figures.get("loss"))))
        for name, value in figures.items():
            if name.endswith("loss") and not math.isfinite(value):
                # Training itself may be sound, and stopping here would lose it: said, not stopped.
                self.say(
                    f"warning: {name} is {value} after step {step}\n"
                    "  why: a held-out row without any label, or a forward pass that overflows; "
                    "the best checkpoint cannot be told by it\n"
                    "  change: look at the held-out rows (`data.eval_source`); with fp16, set `precision: bf16`"
                )

    def saved(self, step: int) -> None:
        """A checkpoint has been written; said at most once a minute."""
        took = self._pace.set_aside()
        self.write(step, "save", {"checkpoint": f"checkpoint-{step}"})
        if time.monotonic() - self._last_save_line >= _SAVE_LINE_SECONDS:
            self._last_save_line = time.monotonic()
            self._progress.note(f"checkpoint-{step} saved ({duration(took)})")

    def end(self) -> None:
        """Training is over: one line says what it was."""
        self._time_first_step(last=True)
        self.settle()
        self._progress.end()
        pace, read = self._pace, self._readings
        parts = [f"trained {count_of(pace.step - pace.begin_step, 'step')} in {duration(pace.elapsed)}"]
        if read.first_loss is not None and read.loss is not None:
            parts.append(f"loss {read.first_loss:.4g} → {read.loss:.4g}")
        if self.skipped:
            parts.append(f"{count_of(self.skipped, 'step')} skipped, for overflow in fp16")
        parts.append(f"peak memory on {self.device} {size(read.peak_memory)}")
        self._progress.note("; ".join(parts))
        self.close()

    def completions(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Completions of a step with their rewards (None: did not apply): shown, and kept in metrics.jsonl."""
        self.write(step, "completions", {"samples": samples})
        for sample in samples:
            rewards = sample["rewards"].items()
            scores = ", ".join(f"{name} {'none' if v is None else f'{v:.3g}'}" for name, v in rewards)
            asked, said = (repr(sample[key][-80:]) for key in ("prompt", "completion"))
            self._progress.note(f"step {step}: {asked} → {said} ({scores})")

    def close(self) -> None:
        """Stop watching and give the terminal back. May be called twice, and at any time."""
        self._rest()
        if self.gradients is not None:
            self.gradients.close()
            self.gradients = None
        self._progress.end()
        self._metrics.close()
        self._training = False
        atexit.unregister(self.close)

    def _rest(self) -> None:
        """Stop watching; the watchdog of the whole process goes on, with the patience that an end needs."""
        if self._own_watchdog:
            self._watchdog.stop()
        elif self._training:
            self._watchdog.settled(False)
            self._watchdog.say = lambda text: print(text, flush=True)
            self.beat("the end of the run")

    def _time_first_step(self, *, last: bool = False) -> None:
        """Said once: when the second step has shown the pace, or when there is no second one."""
        pace = self._pace
        if not self._readings.timed:
            return
        if self._timed or pace.first_step_seconds is None or (pace.seconds_a_step is None and not last):
            return
        self._timed = True
        text = f"first step on {self.device}: {duration(pace.first_step_seconds)}"
        if pace.seconds_a_step is not None:
            text += f"; then about {duration(pace.seconds_a_step)} a step"
            text += f" (about {duration(pace.left)} left)" if pace.left else ""
        self._progress.note(text)
