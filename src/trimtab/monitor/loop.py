"""`LoopMonitor`: progress, metrics, memory and the watchdog for a training loop of our own, without a trainer.

The loop says what it did; nothing here changes it. In a run of several processes the main one shows and writes, and
every one has a watchdog.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.config.schema import MonitorSettings
from trimtab.monitor.memory import MemoryMeter, gpu_busy_share
from trimtab.monitor.metrics import MetricsFile
from trimtab.monitor.pace import Pace
from trimtab.monitor.progress import Figures, make_progress
from trimtab.monitor.watchdog import Watchdog
from trimtab.monitor.wording import count_of, duration, size


class LoopMonitor:
    """Shows, writes down and watches one run. Used as a context: leaving it gives the terminal back."""

    def __init__(
        self, settings: MonitorSettings, run_dir: Path, device: str, rank: int = 0, processes: int = 1
    ) -> None:
        self.device = device
        self._main = rank == 0
        self._progress = make_progress(settings.progress, main=self._main)
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._memory = MemoryMeter(device)
        prefix = f"rank {rank}: " if processes > 1 else ""
        self._watchdog = Watchdog(
            settings.slow_after_seconds,
            settings.stuck_after_seconds,
            lambda text: self.say(prefix + text),
            run_dir / (f"stacks-rank{rank}.txt" if rank else "stacks.txt"),
            gpu_busy=lambda: gpu_busy_share(device),
            processes=processes,
        )
        self._pace = Pace(0, 0)
        self._first_loss: float | None = None
        self._loss: float | None = None
        self._shown: dict[str, Any] = {}

    def __enter__(self) -> LoopMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.stop()
        self._progress.end()
        self._metrics.close()

    def say(self, text: str) -> None:
        """Print a line that matters, without damaging the bar."""
        self._progress.say(text)

    def begin(self, step: int, total: int) -> None:
        """Training begins after `step`; metrics of abandoned later steps are cut."""
        self._pace = Pace(step, total)
        self._watchdog.start()
        if self._main:
            cut = self._metrics.begin(step)
            if step:
                gone = f"; {count_of(cut, 'line')} cut from metrics.jsonl" if cut else ""
                self._progress.note(f"going on after step {step} of {total}{gone}")
        self._progress.begin(self._figures())

    def beat(self, doing: str) -> None:
        """Something got done; `doing` names what comes next."""
        self._watchdog.beat(doing)

    def step(self, step: int, values: Mapping[str, float], more: tuple[str, ...] = (), *, log: bool) -> None:
        """A step is done. `values` has `loss` and `learning_rate`; with `log` they are also written down."""
        self._pace.step_done(step)
        self._loss = values["loss"]
        self._first_loss = self._loss if self._first_loss is None else self._first_loss
        self._shown = {"learning_rate": values["learning_rate"], "more": more}
        if log:
            self._pace.logged(None)
            memory = self._memory.read()
            self._shown["memory"] = memory.now
            own = {
                "steps_per_second": self._pace.steps_per_second,
                "memory_bytes": memory.now,
                "peak_memory_bytes": memory.peak,
                "elapsed_seconds": round(self._pace.elapsed, 3),
            }
            self.write(step, "train", {**values, **{k: v for k, v in own.items() if v is not None}})
        self._watchdog.beat(f"step {step + 1}")
        self._progress.update(self._figures())
        self._progress.settle(self._figures())

    def evaluating(self, done: int, total: int) -> None:
        """So many batches of an evaluation are done."""
        self._watchdog.start()
        self._watchdog.beat("evaluation")
        self._progress.evaluating(done, total)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is over."""
        self._progress.evaluated()
        took = self._pace.set_aside()
        self.write(step, "eval", {f"eval_{name}": value for name, value in metrics.items()})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._progress.note(f"evaluation after step {step}: {figures} ({duration(took)})")

    def saved(self, step: int) -> None:
        """A checkpoint has been written."""
        self._pace.set_aside()
        self._watchdog.beat(f"step {step + 1}")
        self.write(step, "save", {"checkpoint": f"checkpoint-{step}"})

    def end(self) -> None:
        """Training is over: one line says what it was."""
        self._watchdog.stop()
        self._progress.end()
        parts = [f"trained {count_of(self._pace.step - self._pace.begin_step, 'step')} in "]
        parts[0] += duration(self._pace.elapsed)
        if self._first_loss is not None and self._loss is not None:
            parts.append(f"loss {self._first_loss:.4g} → {self._loss:.4g}")
        parts.append(f"peak memory on {self.device} {size(self._memory.read().peak)}")
        self._progress.note("; ".join(parts))

    def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """A line in metrics.jsonl, by the main process alone."""
        if self._main:
            self._metrics.write(step, phase, values)

    def _figures(self) -> Figures:
        pace = self._pace
        return Figures(
            step=pace.step,
            total=pace.total,
            elapsed=pace.elapsed,
            left=pace.left,
            loss=self._loss,
            steps_per_second=pace.steps_per_second,
            **self._shown,
        )
