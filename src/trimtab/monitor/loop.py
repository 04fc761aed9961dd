"""`LoopMonitor`: the monitor of a training loop of our own, without a trainer. The loop says what it did."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.monitor.core import Monitor


class LoopMonitor(Monitor):
    """`begin`, then `step` after every step, `evaluating` and `evaluated`, `saved`, and `end`."""

    def step(self, step: int, values: Mapping[str, float], more: tuple[str, ...] = (), *, log: bool) -> None:
        """A step is done. `values` has `loss` and `learning_rate`; with `log` they are also written down."""
        self._readings.note(values, more)
        self.step_done(step)
        if log:
            tokens = values.get("num_tokens")
            self.logged(step, dict(values), None if tokens is None else int(tokens))
        else:
            self.settle()
        self.beat(f"step {step + 1}")

    def evaluated(self, step: int, figures: Mapping[str, float], seconds: float | None = None) -> None:
        """An evaluation is over: its figures are written down too. One before the first step is no part of that."""
        self.write(step, "eval", {f"eval_{name}": value for name, value in figures.items()})
        super().evaluated(step, figures, seconds)
        if step == self._pace.begin_step:
            self._pace.first_begins()

    def saved(self, step: int) -> None:
        """A checkpoint has been written."""
        super().saved(step)
        self.beat(f"step {step + 1}")
