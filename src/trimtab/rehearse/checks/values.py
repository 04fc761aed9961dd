"""Losses and weights that are not finite, and memory that was used before anything was written to it.

What the user's own code takes from `torch.empty` and its kin is filled with NaN in a rehearsal: on hardware it holds
whatever was there. What is never written to then shows. (`Module.to_empty`: see `unwritten`.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.diagnose import mends_values, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import (
    BaseCheck,
    around,
    backward_hub,
    names_of,
    optimizers_made,
    shown,
    trained_by,
    watch_function,
)
from trimtab.rehearse.checks.sources import Source, Sources, is_finite
from trimtab.rehearse.checks.unwritten import all_nan, fill, tensors_of
from trimtab.virtual import state
from trimtab.virtual.unknown import is_unknown

_EVERY_STEP_UNTIL = 8
_DIVERGED = 1e4
"""A loss that has grown by this factor since the first step did not become infinite by a single operation."""


class Values(BaseCheck):
    """Looks at the loss of every backward pass, and at the weights after steps."""

    def install(self) -> None:
        self._filled: dict[tuple[int, ...], tuple[str, int]] = {}
        """Shapes that the user's code took from torch.empty and its kin, with the line."""
        self._steps = 0
        self._scaled = False
        self._reported = False
        self._losses: deque[float] = deque(maxlen=64)
        self._lost: tuple[Place | None, Source | None] | None = None
        """Where a scaled loss was first NaN, and why: a fault only if none ever was a number."""
        self._numbers = False
        self._raw: float | None = None
        """The loss as it was given to the scaler."""
        self._made = optimizers_made()
        self._sources = Sources()
        for function in (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty):
            watch_function(function, self._fresh)
        around(torch.amp.GradScaler, "scale", self._scale)
        self._beyond = 0
        """Backward passes, one after the other, before which a result was too large for float16."""
        backward_hub().before.append(self._backward)
        backward_hub().after.append(self._swallowed)
        register_optimizer_step_post_hook(self._stepped)

    def _scale(self, real: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        self._scaled |= scaler.is_enabled()
        one = isinstance(outputs, torch.Tensor) and outputs.numel() == 1 and not outputs.is_meta
        self._raw = float(outputs.detach()) if one and not is_unknown(outputs) else None
        return real(scaler, outputs)

    def _fresh(self, caller: FrameType, args: tuple[Any, ...], tensor: Any) -> None:
        if source.is_user_file(caller.f_code.co_filename) and fill(tensor):
            self._filled[tuple(tensor.shape)] = (caller.f_code.co_filename, caller.f_lineno)

    def _backward(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._sources.turn()
        if self._reported:
            return
        for root in roots:
            if root.numel() != 1 or not root.is_floating_point() or root.is_meta or is_unknown(root):
                continue
            value = float(root.detach())
            births = self._sources.births
            if self._scaled:
                # One that the factor makes infinite is skipped, as it is meant to be; the loss itself is judged.
                value, self._raw = value if self._raw is None else self._raw, None
                if not math.isfinite(value) and self._lost is None:
                    self._lost = place, births[0] if births else None
                self._numbers |= math.isfinite(value)
            elif not math.isfinite(value):
                born = births[0] if births else None
                diverged = self._divergence()
                self._report(f"The loss is {value} at backward.", place, "backward", diverged or born)
                return
            else:
                self._losses.append(value)

    def _swallowed(self) -> None:
        """A result beyond float16 that comes to nothing: what is divided by infinity is 0, and so is its gradient."""
        born = next(iter(self._sources.births), None)
        self._beyond = self._beyond + 1 if born is not None and born.beyond else 0
        if self._reported or self._beyond < 2:
            return
        trained = [p for optimizer in list(self._made) for p in trained_by(optimizer) if p.grad is not None]
        dead = [p for p in trained if p.grad is not None and not is_unknown(p) and not bool(p.grad.any())]
        if dead:
            names = shown(names_of(dead), 3)
            message = (
                f"A result is infinite in float16 in every pass, and the whole gradient of {names} is 0."
            )
            self._report(message, born.place if born is not None else None, "forward", born)

    def finish(self) -> None:
        if self._lost is not None and not self._numbers and not self._reported:
            message = "The loss is not finite in any backward pass: GradScaler skips each step, and nothing is trained."
            self._report(message, self._lost[0], "backward", self._lost[1])

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """A gradient that torch itself finds not to be finite: the line whose slope is infinite."""
        if finding.kind != "non-finite" or error is None or self._reported:
            return finding
        born = self._divergence() or next(iter(self._sources.steep), None) or self._hidden()
        if born is None:
            return finding
        return replace(finding, cause=born.cause(), fix=born.fix or finding.fix, edits=born.edits)

    def _divergence(self) -> Source | None:
        """The loss grew and grew: the steps are too large."""
        if len(self._losses) < 2 or abs(self._losses[-1]) < _DIVERGED * max(abs(self._losses[0]), 1e-3):
            return None
        grown = f"the loss grew from {self._losses[0]:.3g} to {self._losses[-1]:.3g} before"
        made = next(iter(self._made.values()), None)
        why, fix = (
            f"{grown}: the learning rate given here is too large",
            "Use a smaller learning rate, or clip gradients.",
        )
        return Source(made, why, fix) if made is not None else None

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._reported or (self._steps > _EVERY_STEP_UNTIL and self._steps & (self._steps - 1)):
            return
        steep = self._sources.steep
        for parameter in trained_by(optimizer):
            mine = getattr(parameter, "_local_tensor", parameter)
            if is_unknown(mine):
                continue
            if not is_finite(mine):
                shape = tuple(parameter.shape)
                message = f"A weight of shape {shape} is not finite after optimizer step {self._steps}."
                born = self._divergence() or next(iter(steep), None) or self._vanished(optimizer, parameter)
                self._report(message, places.here(), "optimizer.step", born or self._hidden())
                return

    def _hidden(self) -> Source | None:
        """A result that was not finite, and of which the loss shows nothing: its gradient is 0 times infinity."""
        for born in self._sources.births[:1]:
            return replace(
                born, why=f"{born.why}; a mask or `where` hides it from the loss, not from its gradient"
            )
        return None

    def _vanished(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Source | None:
        """An eps that is zero in the weights' own precision protects from nothing."""
        mine = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        eps = next((group.get("eps") for group in mine), None)
        if not isinstance(eps, float) or not eps or float(torch.tensor(eps).to(parameter.dtype)):
            return None
        dtype, made = str(parameter.dtype).removeprefix("torch."), self._made.get(optimizer)
        if made is None:
            return None
        why = f"eps={eps:g} is 0 in {dtype}: the step divides 0 by 0"
        return Source(made, why, *mends_values.of_eps(made, dtype))

    def _report(self, message: str, where: Place | None, op: str, born: Source | None) -> None:
        self._reported = True
        if self._filled and self._unwritten():
            return
        fix = (born.fix if born is not None else "") or (
            "Look for a division by zero, a log or square root of zero, a mask that hides a whole row, or a learning "
            "rate that is too high; torch.autograd.set_detect_anomaly(True) names the operation."
        )
        cause, edits = (born.cause(), born.edits) if born is not None else (None, [])
        self.report("non-finite", message, where, cause, fix, op, edits=edits)

    def _unwritten(self) -> bool:
        """Report parameters and buffers that still hold what torch.empty gave them."""
        here = state.machine()
        found = False
        for module in list(here.modules) if here is not None else ():
            for name, tensor in tensors_of(module).items():
                taken = self._filled.get(tuple(tensor.shape))
                if taken is not None and all_nan(tensor):
                    self._report_garbage([name], source.place(*taken), type(module).__name__)
                    found = True
        return found

    def _report_garbage(self, names: list[str], place: Place | None, owner: str) -> None:
        self.report(
            "garbage-buffer",
            f"Used before anything was written to it: {shown(names)} of {owner}. It holds whatever was in memory.",
            place,
            cause_at(place, "this reserves memory and gives it no values"),
            fix="Give it values: torch.zeros(...), nn.init.*, reset_parameters() or load_state_dict(); buffers that "
            "are not in the state dict have to be computed again after to_empty().",
            op="empty",
            module=owner,
        )
