"""16-bit weights whose updates are all rounded away: each step is smaller than half the gap to the next number.

Speaks when, over several steps of one of torch's own optimizers, not one bit of nearly all weights with a gradient has
changed, though float32 could have held the updates. A learning rate that still rises (a warm-up) proves nothing, nor
does an optimizer of another library, which may keep what is rounded away. Never computes a step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import casts, raised_half, source
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, names_of, plain_values, shown
from trimtab.virtual import origin
from trimtab.virtual.unknown import is_unknown

_NARROW = (torch.float16, torch.bfloat16)
_STEPS = 4
"""Steps with gradients that it takes to speak."""
_LOOKS = 32
"""Steps at which is looked."""
_UNCHANGED = 0.99


@dataclass
class _Weight:
    tensor: torch.Tensor
    start: torch.Tensor
    moving: torch.Tensor
    """Which elements had, in any step, an update that float32 would have held."""


@dataclass(eq=False)
class _Run:
    """One optimizer that trains 16-bit weights."""

    weights: dict[int, _Weight] = field(default_factory=dict)
    steps: int = 0
    rate: float = 0.0
    rising: bool = False
    held_back: bool = True
    """Whether a schedule has kept the rate below the one that it was made with, in all steps."""
    stepped: Place | None = None
    stopped: bool = False
    """A weight of nearly all has changed: nothing to say of this one any more."""


class Rounded(BaseCheck):
    """Compares the bits of 16-bit weights before the first step and after the last one that is looked at."""

    def install(self) -> None:
        self._runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()
        self._dead: list[_Run] = []
        """Those in which nothing has changed so far; they outlive their optimizers, to be told of at the end."""
        self._narrow = False
        self._autocast: tuple[str, list[Edit]] | None = None
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _forward(self, module: nn.Module, args: Any) -> None:
        """How the first 16-bit module that is trained would run under autocast."""
        if not self._narrow or self._autocast is not None or not torch.is_grad_enabled():
            return
        weight = next((p for p in module.parameters() if p.requires_grad and p.dtype in _NARROW), None)
        if weight is not None:
            dtype = str(weight.dtype).removeprefix("torch.")
            self._autocast = casts.under_autocast(list(places.frames()), weight.device.type, dtype)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not type(optimizer).__module__.startswith("torch.optim"):
            return
        if optimizer not in self._runs:
            self._runs[optimizer] = _Run()
            self._dead.append(self._runs[optimizer])
        run = self._runs[optimizer]
        if run.stopped or run.steps >= _LOOKS:
            return
        if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
            run.stopped = True  # to read it would be a deed that the program did not do
            return
        rate, moved = 0.0, False
        for group in optimizer.param_groups:
            rate = max(rate, float(group["lr"]))
            for parameter in group["params"]:
                moved |= self._look(run, group, parameter)
        if run.stopped:
            run.weights.clear()
        if run.stopped or not moved:
            return
        run.held_back &= rate < max(group.get("initial_lr", 0.0) for group in optimizer.param_groups)
        run.rising = rate > run.rate > 0 or (run.rising and rate == run.rate)
        run.rate = rate
        run.steps += 1
        run.stepped = run.stepped or places.here()

    def _look(self, run: _Run, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """Note which elements of a 16-bit weight are to move in this step; whether any is."""
        narrow = parameter.dtype in _NARROW
        values, gradient = (plain_values(parameter), plain_values(parameter.grad)) if narrow else (None, None)
        if values is None or gradient is None or is_unknown(parameter):
            # Weights of full precision beside them are trained: that is no dead run.
            run.stopped |= parameter.grad is not None and parameter.requires_grad
            return False
        update = gradient.abs().float()
        if "betas" in group and "eps" in group:
            update = update / (update + group["eps"])
        wide = values.float()
        moving = wide - float(group["lr"]) * update != wide
        known = run.weights.get(id(parameter))
        if known is None:
            self._narrow = True
            run.weights[id(parameter)] = _Weight(parameter, values.clone(), moving)
        else:
            known.moving |= moving
        return bool(moving.any())

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        run = self._runs.get(optimizer)
        if run is None or run.stopped or not 0 < run.steps < _LOOKS:
            return
        if not self._is_still(run):
            run.stopped = True
            run.weights.clear()
            self._dead.remove(run)

    def _is_still(self, run: _Run) -> bool:
        moving = still = 0
        for known in run.weights.values():
            values = plain_values(known.tensor)
            if values is None or values.shape != known.start.shape or values.dtype != known.start.dtype:
                return False
            moving += int(known.moving.sum())
            still += int((known.moving & (values == known.start)).sum())
        return moving > 0 and still >= _UNCHANGED * moving

    def finish(self) -> None:
        for run in self._dead:
            settled = not run.rising and not run.held_back and run.steps >= _STEPS
            if not run.stopped and settled and self._is_still(run):
                self._report(run)

    def _report(self, run: _Run) -> None:
        weights = [known.tensor for known in run.weights.values()]
        dtype = str(weights[0].dtype).removeprefix("torch.")
        lines = origin.lines_of(weights[0])
        choice = next(
            (found for line in lines for found in raised_half.choices(line.file, line.line, (dtype, "half"))),
            None,
        )
        place = choice[0] if choice else source.place(lines[0].file, lines[0].line) if lines else None
        how, edits = (f"; {choice[1]}", choice[2]) if choice else ("", [])
        said, opened = self._autocast or ("run the model under autocast", [])
        self.report(
            "no-gradient",
            f"{run.steps} optimizer steps changed not one bit of {_UNCHANGED:.0%} of the weights that had gradients: "
            f"updates at a learning rate of {run.rate:g} are rounded away in {dtype} ({shown(names_of(weights), 3)}).",
            run.stepped,
            cause_at(place, f"this makes the trained weights {dtype}, which holds about 3 digits"),
            fix=f"Keep the trained weights in float32{how}, and {said}.",
            op="optimizer.step",
            once="rounded",
            edits=[*edits, *opened] if edits and opened else [],
        )
