"""Gradients that still carry GradScaler's factor when something takes them for real: clipping, or a plain step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places, shield
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, trained_by
from trimtab.rehearse.checks.cuts import leaves

_MARK = "_trimtab_scaled"
_Real = Callable[..., Any]


class Scaler(BaseCheck):
    """Follows which parameters got their gradients from a scaled loss."""

    def install(self) -> None:
        self._scaled: dict[int, int] = {}
        """Parameters by id, with the version of their gradient: one changed since is not judged."""
        self._roots: list[torch.Tensor] = []
        self._inside = 0
        self._stepped_at: Place | None = None
        around(torch.amp.GradScaler, "scale", self._scale)
        around(torch.amp.GradScaler, "step", self._within)
        around(torch.amp.GradScaler, "unscale_", self._unscale)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            around(nn.utils, name, self._clip)
            setattr(nn.utils.clip_grad, name, getattr(nn.utils, name))
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(self._forget)

    def _scale(self, real: _Real, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        result = real(scaler, outputs)
        if isinstance(result, torch.Tensor) and scaler.is_enabled() and scaler.get_scale() != 1.0:
            result.__dict__[_MARK] = True
        return result

    def _within(self, real: _Real, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._inside += 1
        try:
            return real(scaler, optimizer, *args, **kwargs)
        finally:
            self._inside -= 1
            self._forget(optimizer, (), {})

    def _unscale(self, real: _Real, scaler: Any, optimizer: Any) -> Any:
        result = real(scaler, optimizer)
        self._forget(optimizer, (), {})
        return result

    def _clip(self, real: _Real, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # By itself: what was an iterator is used up now.
        shield.call("Scaler", self._look_at_clip, given, real.__name__)
        return real(given, *args, **kwargs)

    def _look_at_clip(self, given: list[torch.Tensor], name: str) -> None:
        if self._scaled and self._carry(given):
            self._report_clip(name)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._roots = [root for root in roots if _MARK in root.__dict__]
        for root in self._roots:
            for leaf in leaves(root):
                self._scaled[id(leaf)] = -1

    def _after(self) -> None:
        if not self._roots:
            return
        for leaf in (leaf for root in self._roots for leaf in leaves(root)):
            self._scaled[id(leaf)] = leaf.grad._version if leaf.grad is not None else -1
        self._roots = []

    def _carry(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(
            parameter.grad is not None and self._scaled.get(id(parameter)) == parameter.grad._version
            for parameter in parameters
        )

    def _forget(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in trained_by(optimizer):
            self._scaled.pop(id(parameter), None)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or not self._scaled or not self._carry(trained_by(optimizer)):
            return
        self._stepped_at = places.here()
        self.report(
            "scaler-misuse",
            "optimizer.step() uses gradients that are still multiplied by the GradScaler's factor (65536 at first): "
            "the steps are far too large, and infinite gradients are not skipped.",
            self._stepped_at,
            cause_at(self._stepped_at, "the loss was scaled, this step does not know of it"),
            fix="Step through the scaler: scaler.step(optimizer), then scaler.update().",
            op="optimizer.step",
        )

    def _report_clip(self, name: str) -> None:
        place = places.here()
        self.report(
            "scaler-misuse",
            f"{name} is given gradients that are still multiplied by the GradScaler's factor: the limit is met at "
            "once, and after unscaling the gradients are nearly nothing.",
            place,
            cause_at(place, "the gradients are clipped before they are unscaled"),
            fix="Unscale first: scaler.unscale_(optimizer), then clip, then scaler.step(optimizer).",
            op=name,
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """update() finds that nothing was stepped through the scaler: the plain step is the line to change."""
        if finding.kind == "scaler-misuse" and self._stepped_at is not None and "update" in finding.message:
            why = "the optimizer is stepped past the scaler here"
            return replace(finding, cause=cause_at(self._stepped_at, why))
        return finding
