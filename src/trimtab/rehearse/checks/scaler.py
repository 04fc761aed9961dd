"""Gradients that still carry GradScaler's factor when something takes them for real: clipping, or a plain step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import mends_scaler
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.diagnose.raised_common import own_frames
from trimtab.rehearse import places, shield
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, optimizers_made, trained_by
from trimtab.rehearse.checks.cuts import leaves

_MARK = "_trimtab_scaled"
_Real = Callable[..., Any]


class Scaler(BaseCheck):
    """Follows which parameters got their gradients from a scaled loss."""

    def install(self) -> None:
        self._scaled: dict[int, int] = {}
        """Parameters by id, with the version of their gradient: one changed since is not judged."""
        self._bare: dict[int, tuple[int, Place | None]] = {}
        """The same of losses that were not scaled, with their line."""
        self._whose: dict[int, torch.amp.GradScaler] = {}
        """The scaler of the loss that gave a parameter, by id, its gradient."""
        self._last: torch.amp.GradScaler | None = None
        self._through: Place | None = None
        """Where an optimizer was last stepped through a scaler."""
        self._called: Any = None
        """The scaler that was last asked to step or to unscale."""
        self._idle = False
        """Whether the optimizer that it was asked to step had been stepped before."""
        self._passes = 0
        self._done: dict[int, int] = {}
        """Optimizers by id that a scaler has stepped, with the number of backward passes until then."""
        self._made = optimizers_made()
        self._roots: list[torch.Tensor] = []
        self._unmarked: list[torch.Tensor] = []
        self._inside = 0
        self._stepped_at: Place | None = None
        self._plain: Place | None = None
        """The last backward pass of a loss that was not scaled."""
        self._unscaled: list[Place] = []
        """Where gradients were unscaled since the last update."""
        around(torch.amp.GradScaler, "scale", self._scale)
        around(torch.amp.GradScaler, "step", self._within)
        around(torch.amp.GradScaler, "unscale_", self._unscale)
        around(torch.amp.GradScaler, "update", self._update)
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
            result.__dict__[_MARK] = scaler
            self._last = scaler
        return result

    def _within(self, real: _Real, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._inside += 1
        self._called, self._through = scaler, places.here()
        shield.call("Scaler", self._look_at_owner, scaler, optimizer)
        self._idle = id(optimizer) in self._done
        try:
            return real(scaler, optimizer, *args, **kwargs)
        finally:
            self._inside -= 1
            self._done[id(optimizer)] = self._passes
            self._forget(optimizer, (), {})

    def _look_at_owner(self, scaler: Any, optimizer: Any) -> None:
        """Gradients that carry the factor of another scaler than the one that is to take it away."""
        held = [p for p in trained_by(optimizer) if self._carry([p])]
        owner = next((o for p in held if (o := self._whose.get(id(p))) is not None and o is not scaler), None)
        if owner is None:
            return
        self._stepped_at = place = places.here()
        fix, edits = mends_scaler.stepped(place, places.frames(), owner, owned=True)
        self.report(
            "scaler-misuse",
            "An optimizer is stepped through another GradScaler than the one that scaled its loss: the factors of the "
            "two go apart, and the other one finds that nothing was stepped.",
            place,
            cause_at(place, "this scaler did not scale the loss that these gradients come from"),
            fix=fix,
            op="optimizer.step",
            once="owner",
            edits=edits,
        )

    def _update(self, real: _Real, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._unscaled = []
        return real(scaler, *args, **kwargs)

    def _unscale(self, real: _Real, scaler: Any, optimizer: Any) -> Any:
        self._called = scaler
        result = real(scaler, optimizer)
        if (place := places.here()) is not None:
            self._unscaled.append(place)
        self._forget(optimizer, (), {})
        return result

    def _clip(self, real: _Real, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # By itself: what was an iterator is used up now.
        shield.call("Scaler", self._look_at_clip, given, real.__name__)
        return real(given, *args, **kwargs)

    def _look_at_clip(self, given: list[torch.Tensor], name: str) -> None:
        if self._scaled and self._carry(given):
            wanted = {id(parameter) for parameter in given}
            made = (o for o in list(self._made) if any(id(p) in wanted for p in trained_by(o)))
            self._report_clip(name, next(made, None))

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._passes += 1
        self._roots = [root for root in roots if _MARK in root.__dict__]
        self._plain = None if self._roots else place
        if self._last is not None and not self._inside:
            shield.call("Scaler", self._look_at_mixture, roots, place)
        for root in self._roots:
            for leaf in leaves(root):
                self._scaled[id(leaf)] = -1

    def _after(self) -> None:
        for leaf, scaler in ((leaf, root.__dict__[_MARK]) for root in self._roots for leaf in leaves(root)):
            self._scaled[id(leaf)] = leaf.grad._version if leaf.grad is not None else -1
            self._whose[id(leaf)] = scaler
        for leaf in self._unmarked:
            if leaf.grad is not None and self._last is not None:
                self._bare[id(leaf)] = leaf.grad._version, self._plain
        self._roots, self._unmarked = [], []

    def _look_at_mixture(self, roots: list[torch.Tensor], place: Place | None) -> None:
        """A loss that is scaled and one that is not, added up in the same gradient: unscaling spoils one of them."""
        self._unmarked = [leaf for root in roots if _MARK not in root.__dict__ for leaf in leaves(root)]
        held = [leaf for root in roots for leaf in leaves(root) if leaf.grad is not None]
        bare = place
        if self._roots:
            known = [(self._bare.get(id(leaf)), leaf.grad) for leaf in held]
            met = [at for at, grad in known if at is not None and grad is not None and at[0] == grad._version]
            bare = met[0][1] if met else None
        elif not self._carry(held):
            return
        if bare is None:
            return
        fix, edits = mends_scaler.scaled(bare, places.frames(), self._last)
        self.report(
            "scaler-misuse",
            "Gradients of a loss that was multiplied by the GradScaler's factor and of one that was not are added up: "
            "after unscaling the second counts for nothing (65536 times too little at first).",
            bare,
            cause_at(
                bare, "this loss is sent backward without the scaler, into gradients that carry its factor"
            ),
            fix=fix,
            op="backward",
            once="mixture",
            edits=edits,
        )

    def _carry(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(
            parameter.grad is not None and self._scaled.get(id(parameter)) == parameter.grad._version
            for parameter in parameters
        )

    def _forget(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in trained_by(optimizer):
            self._scaled.pop(id(parameter), None)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        again = self._done.get(id(optimizer)) == self._passes
        if again and any(p.grad is not None for p in trained_by(optimizer)):
            self._report_again(places.here())
        if not self._scaled or not self._carry(trained_by(optimizer)):
            return
        self._stepped_at = places.here()
        fix, edits = mends_scaler.stepped(self._stepped_at, places.frames(), self._last)
        self.report(
            "scaler-misuse",
            "optimizer.step() uses gradients that are still multiplied by the GradScaler's factor (65536 at first): "
            "the steps are far too large, and infinite gradients are not skipped.",
            self._stepped_at,
            cause_at(self._stepped_at, "the loss was scaled, this step does not know of it"),
            fix=fix,
            op="optimizer.step",
            edits=edits,
        )

    def _report_again(self, place: Place | None) -> None:
        fix, edits = mends_scaler.left_out(place)
        self.report(
            "scaler-misuse",
            "The optimizer is stepped twice with the same gradients: through the scaler, and once more by itself.",
            place,
            cause_at(place, "the scaler has made this step already"),
            fix=fix,
            op="optimizer.step",
            once="again",
            edits=edits,
        )

    def _report_clip(self, name: str, optimizer: Any) -> None:
        place = places.here()
        known, (fix, edits) = mends_scaler.unscaled_first(places.frames(), self._last, optimizer)
        self.report(
            "scaler-misuse",
            f"{name} is given gradients that are still multiplied by the GradScaler's factor: the limit is met at "
            "once, and after unscaling the gradients are nearly nothing.",
            place,
            cause_at(known or place, "the gradients are clipped before they are unscaled"),
            fix=fix,
            op=name,
            edits=edits,
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """update() finds that nothing was stepped through the scaler: the plain step is the line to change."""
        if finding.kind == "scaler-misuse" and self._stepped_at is not None and "update" in finding.message:
            why = "the optimizer is stepped past the scaler here"
            return replace(finding, cause=cause_at(self._stepped_at, why))
        frames = [frame for frame, _ in own_frames(error)] if error is not None else []
        if "recorded for this optimizer" in finding.message and self._idle and finding.where is not None:
            fix, edits = mends_scaler.where_due(finding.where)
            why = "no parameter of this optimizer got a gradient in this round, as they did in earlier ones"
            return replace(finding, cause=cause_at(finding.where, why), fix=fix, edits=edits)
        if (
            finding.kind == "scaler-misuse"
            and "_scale is None" in finding.message
            and self._plain is not None
        ):
            fix, edits = mends_scaler.scaled(self._plain, frames, self._called)
            cause = cause_at(self._plain, "the loss is sent backward here without the scaler")
            return replace(finding, cause=cause, fix=fix, edits=edits)
        if "called after step()" in finding.message and self._through is not None:
            edits = mends_scaler.stepped_last(self._through)
            fix = f"Step last: put line {self._through.line} behind what uses the unscaled gradients, before update()."
            cause = cause_at(self._through, "this steps before the gradients are unscaled and clipped")
            return replace(finding, cause=cause, fix=fix, edits=edits)
        if "already been called" not in finding.message or finding.where is None:
            return finding
        if "step() has already" in finding.message:
            fix, edits = mends_scaler.updated(finding.where, frames, self._called)
            cause = cause_at(
                finding.where, "this steps again, and the scaler was not updated since the last step"
            )
            return replace(finding, cause=cause, fix=fix, edits=edits)
        if self._unscaled:
            place, (fix, edits) = mends_scaler.once(self._unscaled[0], finding.where)
            why = "this unscales gradients that are unscaled already"
            if place != finding.where:
                why = f"the round ends without an update, so that line {finding.where.line} unscales a second time"
            cause = cause_at(place, why)
            return replace(finding, cause=cause, fix=fix, edits=edits)
        return finding
