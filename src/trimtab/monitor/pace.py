"""How fast a run goes: seconds a step, tokens a second, time left. Counts and divides; shows nothing."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """One training's clock. Time spent in evaluation and saving counts towards the time left, not the speed."""

    def __init__(self, step: int, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.begin_step = self.step = step
        self.total = total
        self.first_step_seconds: float | None = None
        self.tokens_per_second: float | None = None
        self.steps_per_second: float | None = None
        self._began = self._first_began = self._last_event = self._now()
        self._first_ended = 0.0
        self._aside = self._aside_at_first = 0.0
        self._window = (0.0, step)
        self._tokens: tuple[float, int] | None = (0.0, 0) if step == 0 else None
        self.flops_per_second: float | None = None
        self._flops = (0.0, 0.0)

    @property
    def elapsed(self) -> float:
        return self._now() - self._began

    def first_begins(self) -> None:
        self._first_began = self._now()

    def touch(self) -> None:
        """Training did something just now: whatever is set aside next began here."""
        self._last_event = self._now()

    def set_aside(self) -> float:
        """What was done since the last event was no training; says how long it took."""
        now = self._now()
        spent = now - self._last_event
        self._aside += spent
        self._last_event = now
        return spent

    def step_done(self, step: int) -> None:
        self.touch()
        self.step = step
        if self.first_step_seconds is None:
            self._first_ended = self._last_event
            self._aside_at_first = self._aside
            self.first_step_seconds = self._first_ended - self._first_began

    def logged(self, tokens: int | None, flops: float | None = None) -> None:
        """Figures for the steps since the last log; `tokens` counts from the beginning of the run, `flops`, the
        operations that the model needed, from that of this training."""
        now = self._now() - self._began - self._aside
        if self.step > self._window[1]:
            self.steps_per_second = (self.step - self._window[1]) / max(now - self._window[0], 1e-9)
            self._window = (now, self.step)
        if tokens is not None:
            if self._tokens is not None and tokens > self._tokens[1]:
                self.tokens_per_second = (tokens - self._tokens[1]) / max(now - self._tokens[0], 1e-9)
            self._tokens = (now, tokens)
        if flops is not None:
            self.flops_per_second = (flops - self._flops[1]) / max(now - self._flops[0], 1e-9)
            self._flops = (now, flops)

    @property
    def seconds_a_step(self) -> float | None:
        """The mean since the first step, which is left out: it pays for warming up."""
        steps = self.step - self.begin_step - 1
        if steps < 1:
            return None
        training = self._last_event - self._first_ended - (self._aside - self._aside_at_first)
        return training / steps

    @property
    def left(self) -> float | None:
        """Time to the last step, at the pace since the first one, evaluations and saving included."""
        steps = self.step - self.begin_step - 1
        if steps < 1:
            return None
        return (self._last_event - self._first_ended) / steps * (self.total - self.step)
