"""Gradients that still carry GradScaler's factor when something takes them for real: clipping, or a plain step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub
from trimtab.rehearse.checks.cuts import leaves

_MARK = "_trimtab_scaled"


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
            real = getattr(nn.utils, name)
            clip = functools.wraps(real)(self._clip(real, name))
            setattr(nn.utils, name, clip)
            setattr(nn.utils.clip_grad, name, clip)
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(self._forget)

    def _scale(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            result = real(scaler, outputs)
            if isinstance(result, torch.Tensor) and scaler.is_enabled() and scaler.get_scale() != 1.0:
                result.__dict__[_MARK] = True
            return result

        return scale

    def _within(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return real(scaler, optimizer, *args, **kwargs)
            finally:
                self._inside -= 1
                self._forget(optimizer, (), {})

        return step

    def _unscale(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(scaler: torch.amp.GradScaler, optimizer: Any) -> Any:
            result = real(scaler, optimizer)
            self._forget(optimizer, (), {})
            return result

        return unscale_

    def _clip(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if self._scaled and self._carry(given):
                self._report_clip(name)
            return real(given, *args, **kwargs)

        return clip

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
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                self._scaled.pop(id(parameter), None)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or not self._scaled:
            return
        if self._carry(parameter for group in optimizer.param_groups for parameter in group["params"]):
            self._stepped_at = places.here()
            self.process.report(
                Finding(
                    kind="scaler-misuse",
                    message="optimizer.step() uses gradients that are still multiplied by the GradScaler's factor "
                    "(65536 at first): the steps are far too large, and infinite gradients are not skipped.",
                    where=self._stepped_at,
                    cause=places.cause_at(
                        self._stepped_at, "the loss was scaled, this step does not know of it"
                    ),
                    fix="Step through the scaler: scaler.step(optimizer), then scaler.update().",
                    op="optimizer.step",
                )
            )

    def _report_clip(self, name: str) -> None:
        place = places.here()
        self.process.report(
            Finding(
                kind="scaler-misuse",
                message=f"{name} is given gradients that are still multiplied by the GradScaler's factor: the limit "
                "is met at once, and after unscaling the gradients are nearly nothing.",
                where=place,
                cause=places.cause_at(place, "the gradients are clipped before they are unscaled"),
                fix="Unscale first: scaler.unscale_(optimizer), then clip, then scaler.step(optimizer).",
                op=name,
            )
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """update() finds that nothing was stepped through the scaler: the plain step is the line to change."""
        if finding.kind == "scaler-misuse" and self._stepped_at is not None and "update" in finding.message:
            return replace(
                finding,
                cause=places.cause_at(self._stepped_at, "the optimizer is stepped past the scaler here"),
            )
        return finding
