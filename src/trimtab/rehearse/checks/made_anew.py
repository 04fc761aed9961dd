"""Parameters that are made anew in every step, get a gradient and are held by no optimizer: they are never trained.

Speaks only of a line that itself makes a parameter or a layer, whose new parameters are behind the same loss as trained
ones in several steps on end. Whose gradient the program reads itself (an attack, a copy that is adapted), what is made
once, and layers of normalisation, which begin as if they had no weights, are let be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import mends_anew
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, ever_held, place_born
from trimtab.rehearse.checks.cuts import leaves

_STEPS = 3
"""Steps on end, each with new parameters from one line, that it takes to speak."""
_LOOKS = 12
"""Backward passes that are looked at."""
_MARK = "_trimtab_stepped"


@dataclass
class _Line:
    place: Place
    steps: int = 0


class MadeAnew(BaseCheck):
    """Looks at the parameters behind a loss that no optimizer holds, and which of them were there a step before."""

    def install(self) -> None:
        self._held = ever_held()
        self._looks = 0
        self._pending: list[torch.Tensor] = []
        """Parameters of the last backward passes that no optimizer holds."""
        self._lines: dict[tuple[str, int], _Line] = {}
        backward_hub().before.append(self._before)
        register_optimizer_step_pre_hook(self._step)
        around(torch.optim.Optimizer, "zero_grad", self._clear)
        around(nn.Module, "zero_grad", self._clear)

    def _clear(self, real: Callable[..., Any], whose: Any, *args: Any, **kwargs: Any) -> Any:
        self._pending.clear()  # no step follows from those passes
        return real(whose, *args, **kwargs)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._looks += 1
        if self._looks > _LOOKS or not self._held:
            return
        behind = [leaf for root in roots if root.requires_grad for leaf in leaves(root)]
        if any(id(leaf) in self._held for leaf in behind):
            self._pending += [p for p in behind if isinstance(p, nn.Parameter) and id(p) not in self._held]

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        new: dict[tuple[str, int], Place] = {}
        for parameter in self._pending:
            place = place_born(parameter) if parameter.grad is not None else None
            if place is None or id(parameter) in self._held:
                continue
            if _MARK in parameter.__dict__:
                self._lines.pop((place.file, place.line), None)  # it was there in the step before
            else:
                parameter.__dict__[_MARK] = True
                new[place.file, place.line] = place
        if self._pending:
            self._lines = {key: self._lines.get(key) or _Line(place) for key, place in new.items()} | {
                key: line for key, line in self._lines.items() if line.steps >= _STEPS
            }
            for key in new:
                self._lines[key].steps += 1
        self._pending.clear()

    def finish(self) -> None:
        for line in self._lines.values():
            made = mends_anew.maker(line.place) if line.steps >= _STEPS else None
            if made is None or mends_anew.gradient_is_read(line.place):
                continue
            fix, edits = mends_anew.made_once(line.place, made)
            self.report(
                "no-gradient",
                f"Every step makes new parameters here, which get a gradient, are in no optimizer and are thrown away: "
                f"what they learn is lost ({line.steps} steps).",
                line.place,
                cause_at(line.place, "this runs in every step, and makes the parameters anew"),
                fix=fix,
                op="optimizer.step",
                edits=edits,
            )
