"""`LoopMonitor`: the monitor of a training loop of our own, without a trainer. The loop says what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.monitor.core import Monitor
from trimtab.monitor.health import OFF, Found, NonFiniteError
from trimtab.monitor.inquest import Scene, inquest
from trimtab.monitor.record import Pass
from trimtab.monitor.verdict import History


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

    def unfinished(
        self,
        error: str,
        step: int,
        batches: list[dict[str, Any]],
        again: Callable[[dict[str, Any]], Any],
        known: tuple[nn.Module, Any, History],
        processes: int,
    ) -> str:
        """What to say of a step that met numbers which are not finite, by the first line of `error` and by running its
        batches again. `known`: the model, what reads its tokens, and how the run went."""
        model, processor, history = known
        nothing = (torch.get_rng_state(), None)
        passes = [Pass(batch, None, nothing, torch.zeros(())) for batch in batches]
        found, *rest = error.splitlines()
        why, change = (part.strip().partition(": ")[2] for part in [*rest, "", ""][:2])
        record = Found(passes, [0.0] * len(passes), None)
        standing = self.standing(step, history.learning_rate)
        scene = Scene(
            model,
            lambda one: again(dict(one.inputs or {})),
            sharded=False,
            processor=processor,
            history=history,
            run_dir=self.run_dir,
            owner=(lambda number: number % processes) if processes > 1 else None,
        )
        told = inquest(NonFiniteError(found, why, change, standing, "loss", (), record), scene, 0, 1)
        change = told.change.replace(f". {OFF}", "")  # a slope that is no number is never followed
        return f"{told.found}\n  why: {told.why}\n  change: {change}"

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
