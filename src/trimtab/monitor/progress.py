"""What a person sees of a running training: a bar on a terminal, or a few plain lines in a log.

Everything goes to stderr, so that stdout stays free for results. Only shows what it is given; measures nothing.
Plain lines come at every twentieth of the steps and after five minutes without one, so that a log stays readable.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from trimtab.monitor.wording import clock, rate, size

Mode = Literal["auto", "bar", "plain", "none"]

_LINES = 20
_SILENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Figures:
    """The state of a run after `step`; what is not known (yet) is None."""

    step: int
    total: int
    elapsed: float
    left: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    skipped: int = 0
    """Steps that an fp16 gradient scaler has skipped."""
    tokens_per_second: float | None = None
    utilisation: float | None = None
    """Which share of the GPU's highest rate the model's own operations took."""
    steps_per_second: float | None = None
    memory: int | None = None
    more: tuple[str, ...] = ()
    """Figures of a recipe's own, as they are shown."""

    def values(self) -> str:
        figures = {
            "loss {:.4g}": self.loss,
            "lr {:.2e}": self.learning_rate,
            "grad norm {:.3g}": self.grad_norm,
        }
        parts = [form.format(value) for form, value in figures.items() if value is not None]
        parts += [f"skipped {self.skipped}"] if self.skipped else []
        parts += self.more
        if self.tokens_per_second is not None:
            parts.append(rate(self.tokens_per_second, "tokens"))
        elif self.steps_per_second is not None:
            parts.append(rate(self.steps_per_second, "steps"))
        if self.utilisation is not None:
            parts.append(f"MFU {self.utilisation:.0%}")
        if self.memory is not None:
            parts.append(f"memory {size(self.memory)}")
        return "  ".join(parts)

    def line(self) -> str:
        parts = [f"step {self.step}/{self.total}", self.values(), f"elapsed {clock(self.elapsed)}"]
        if self.left is not None and self.step < self.total:
            parts.append(f"left {clock(self.left)}")
        return "  ".join(filter(None, parts))


class Quiet:
    """Shows no progress (`none`); warnings said with `say` still reach the person."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """A line that matters in every mode. May be called from any thread."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True, style=None)

    def note(self, text: str) -> None:
        """A line that belongs to the progress."""

    def begin(self, figures: Figures) -> None:
        """Training begins after `figures.step`."""

    def update(self, figures: Figures) -> None:
        """A step is done, or something about it was measured."""

    def settle(self, figures: Figures) -> None:
        """Nothing more will be measured about `figures.step`."""

    def evaluating(self, done: int, total: int | None) -> None:
        """So many batches of an evaluation are done."""

    def evaluated(self) -> None:
        """The evaluation is over."""

    def end(self) -> None:
        """Nothing more comes. May be called twice."""


class Plain(Quiet):
    """A few lines, for logs."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last_step = 0
        self._last_time = time.monotonic()

    def note(self, text: str) -> None:
        self.say(text)
        self._last_time = time.monotonic()

    def begin(self, figures: Figures) -> None:
        self._last_step = figures.step
        self._last_time = time.monotonic()

    def settle(self, figures: Figures) -> None:
        if figures.step <= self._last_step:
            return
        marks = [step * _LINES // max(figures.total, 1) for step in (self._last_step, figures.step)]
        if marks[0] < marks[1] or time.monotonic() - self._last_time >= _SILENCE_SECONDS:
            self._last_step = figures.step
            self.note(figures.line())

    def evaluating(self, done: int, total: int | None) -> None:
        if time.monotonic() - self._last_time >= _SILENCE_SECONDS:
            self.note(f"evaluation: {done}/{total}" if total else f"evaluation: {done} batches")


class Bar(Quiet):
    """A bar with the figures under it, redrawn in place; a second bar while an evaluation goes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._display: _Display | None = None
        self._steps: TaskID | None = None
        self._evaluation: TaskID | None = None

    def note(self, text: str) -> None:
        self.say(text)

    def begin(self, figures: Figures) -> None:
        self.end()
        self._steps = self._opened().add_task("training", total=figures.total, completed=figures.step)

    def update(self, figures: Figures) -> None:
        if self._display is not None and self._steps is not None:
            due = None if figures.left is None else time.monotonic() + figures.left
            self._display.figures = figures.values()
            self._display.update(self._steps, completed=figures.step, total=figures.total, due=due)

    def evaluating(self, done: int, total: int | None) -> None:
        display = self._opened()
        if self._evaluation is None:
            self._evaluation = display.add_task("evaluation", total=total, completed=done)
        display.update(self._evaluation, completed=done)

    def evaluated(self) -> None:
        if self._display is not None and self._evaluation is not None:
            self._display.remove_task(self._evaluation)
            self._evaluation = None
            if self._steps is None:
                self.end()

    def end(self) -> None:
        if self._display is not None:
            self._display.stop()
        self._display = self._steps = self._evaluation = None

    def _opened(self) -> _Display:
        if self._display is None:
            self._display = _Display(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                _TimeColumn(),
                console=self.console,
                refresh_per_second=4,
                expand=True,
                # A piped stdout belongs to whoever reads the pipe; only what would hit the bar is taken over.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._display.start()
        return self._display


class _Display(Progress):
    """rich's bar, with a line of figures under it."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis")


class _TimeColumn(ProgressColumn):
    """Time since the start and, counting down between the steps, time left."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        text = clock(task.elapsed or 0)
        due = task.fields.get("due")
        if due is not None and not task.finished:
            text += f" < {clock(max(0.0, due - time.monotonic()))} left"
        return Text(text)


def make_progress(mode: Mode, *, console: Console | None = None, main: bool = True) -> Quiet:
    """The display for a mode of `monitor.progress`; processes other than the main one only say warnings."""
    if console is None:
        console = Console(stderr=True, force_terminal=True if mode == "bar" else None)
    if not main or mode == "none":
        return Quiet(console)
    if mode == "auto":
        mode = "bar" if _is_terminal(console) else "plain"
    return Bar(console) if mode == "bar" else Plain(console)


def _is_terminal(console: Console) -> bool:
    # Not `console.is_terminal`, which FORCE_COLOR makes true for a log file too.
    return console.file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
