"""Gradients that nobody clears between two steps, or that are cleared before the step they were gathered for.

Looks at one small parameter of each optimizer, whose values tell: a gradient that a step has used and that a later
backward pass adds to, in step after step. Whoever changes gradients by hand in between, or clears them, is let be.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, trained_by
from trimtab.virtual.tensor import payload_of

_ENOUGH = 2
"""Steps in a row."""


@dataclass
class _Watched:
    probe: torch.Tensor | None = None
    used: torch.Tensor | None = None
    """The gradient as the last step left it."""
    waiting: bool = False
    """Whether no backward pass has reached the probe since the last step."""
    as_left: bool = False
    stale: bool = False
    """Whether the pass that did so added to what the step had used."""
    times: int = 0
    gathered: int = 0
    """Backward passes since the last step or clearing."""
    lost_at: Place | None = None
    lost: int = 0


class Clearing(BaseCheck):
    """Follows what becomes of gradients from step to step."""

    def install(self) -> None:
        self._watched: WeakKeyDictionary[Any, _Watched] = WeakKeyDictionary()
        self._done = self.process.settings.shapes_only
        around(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(self._stepped)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        for watched in self._watched.values() if not self._done else ():
            gradient = _values(watched.probe)
            if watched.waiting:
                watched.as_left = _same(gradient, watched.used)
            elif gradient is None or not gradient.any():
                watched.stale = False  # what an earlier pass left there by the way was cleared after all

    def _after(self) -> None:
        for watched in self._watched.values() if not self._done else ():
            watched.gathered += 1
            gradient = _values(watched.probe)
            if watched.waiting and gradient is not None and not _same(gradient, watched.used):
                watched.waiting, watched.stale = False, watched.as_left

    def _zero_grad(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watched = self._watched.get(optimizer)
        if watched is not None and watched.gathered:
            watched.lost_at, watched.gathered = places.here(), 0
        return real(optimizer, *args, **kwargs)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watched.get(optimizer)
        if watched is None or self._done:
            return
        watched.times = watched.times + 1 if watched.stale else 0
        if watched.times == _ENOUGH:
            self._never_cleared(places.here())
        watched.lost = watched.lost + 1 if watched.lost_at is not None else 0
        if watched.lost == _ENOUGH:
            self._cleared_early(watched.lost_at, places.here())

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._done:
            return
        watched = self._watched.setdefault(optimizer, _Watched())
        if watched.probe is None:
            trained = [p for p in trained_by(optimizer) if _values(p) is not None]
            watched.probe = min(trained, key=lambda p: p.numel(), default=None)
        gradient = _values(watched.probe)
        kept = gradient is not None and bool(gradient.any())
        watched.used = gradient.clone() if gradient is not None and kept else None
        watched.waiting, watched.stale, watched.gathered, watched.lost_at = kept, False, 0, None

    def _never_cleared(self, stepped: Place | None) -> None:
        self._done = True
        optimizer = _optimizer_on(stepped)
        code = f"{optimizer or 'optimizer'}.zero_grad()"
        node = source.statement(stepped.file, stepped.line) if stepped is not None else None
        plain = isinstance(node, ast.Expr | ast.Assign) and optimizer is not None
        edits = [rewrite.after(stepped.file, node, code)] if stepped and node and plain else []
        self.report(
            "stale-gradient",
            "Nothing clears the gradients between the steps: each step applies the sum of the gradients of all steps "
            "before it again.",
            stepped,
            cause_at(
                stepped, "the gradients of this step are still there when the next backward pass adds to them"
            ),
            fix=f"Clear them after the step (or before the next backward pass): {code}.",
            op="optimizer.step",
            edits=edits,
        )

    def _cleared_early(self, cleared: Place | None, stepped: Place | None) -> None:
        """Only where the source shows that gradients are gathered: a step in every n-th round, clearing in each."""
        if cleared is None or stepped is None or cleared.file != stepped.file:
            return
        file = cleared.file
        clear, step = source.statement(file, cleared.line), source.statement(file, stepped.line)
        if clear is None or step is None or not isinstance(clear, ast.Expr):
            return
        every = next((n for n in source.above(file, step) if isinstance(n, ast.If) and _counts(n.test)), None)
        loop = next((n for n in source.above(file, step) if isinstance(n, ast.For | ast.While)), None)
        above = list(source.above(file, clear))
        if every is None or every in above or loop is None or loop not in above:
            return
        self._done = True
        code = rewrite.text_of(file, clear)
        edits: list[Edit] = [rewrite.without(file, clear), rewrite.after(file, step, code)]
        self.report(
            "stale-gradient",
            "Gradients are gathered over several batches, and cleared again in every one: each step uses those of its "
            "last batch alone.",
            stepped,
            cause_at(cleared, f"this runs in every round, the step (line {stepped.line}) only in some"),
            fix=f"Clear them after the step, inside `if {ast.unparse(every.test)}:`: {code}.",
            op="optimizer.zero_grad",
            edits=edits,
        )


def _counts(test: ast.expr) -> bool:
    """Whether a condition holds in every n-th round: `(i + 1) % n == 0`."""
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in ast.walk(test))


def _optimizer_on(place: Place | None) -> str | None:
    """How the line that steps calls the optimizer: `opt` in opt.step() and in scaler.step(opt)."""
    for call in source.call_on(place.file, place.line) if place is not None else ():
        if source.called_name(call) == "step" and isinstance(call.func, ast.Attribute):
            given = call.args[0] if call.args else call.func.value
            return ast.unparse(given)
    return None


def _values(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The values of a plain parameter's gradient; None where there is none, or it lies in parts on several ranks."""
    gradient = parameter.grad if parameter is not None else None
    if gradient is None or gradient.is_sparse or hasattr(gradient, "_local_tensor"):
        return None
    values = payload_of(gradient)
    return values if values.numel() and not values.is_meta else None


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)
