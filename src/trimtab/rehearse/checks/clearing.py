"""Gradients that nobody clears between two steps, or that are cleared before the step they were gathered for.

Looks at one small parameter of each optimizer, whose values tell: a gradient that a step has used and that a later
backward pass adds to, in step after step. Whoever changes gradients by hand in between, or clears them, is let be.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import dead_lines, rewrite, source
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks import base

_ENOUGH = 2
"""Steps in a row."""


@dataclass
class _Watched:
    probe: torch.Tensor | None = None
    used: torch.Tensor | None = None
    """The gradient as the last step left it."""
    waiting: bool = False
    """Whether no backward pass has reached the probe since the last step."""
    before: torch.Tensor | None = None
    """The gradient as the present backward pass found it."""
    as_left: bool = False
    stale: bool = False
    """Whether the pass that did so added to what the step had used."""
    times: int = 0
    gathered: int = 0
    """Backward passes that reached it since the last step or clearing."""
    lost_at: Place | None = None
    lost: int = 0
    idle: bool = False
    """Whether no backward pass at all has run since the last step or clearing."""


class Clearing(base.BaseCheck):
    """Follows what becomes of gradients from step to step."""

    def install(self) -> None:
        self._watched: WeakKeyDictionary[Any, _Watched] = WeakKeyDictionary()
        self._done = self.process.settings.shapes_only
        base.around(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._stepped_at: Place | None = None
        self._clips: Counter[Place] = Counter()
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            base.around(torch.nn.utils, name, self._clip)
            setattr(torch.nn.utils.clip_grad, name, getattr(torch.nn.utils, name))
        hub = base.backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(self._stepped)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        for watched in self._watched.values():
            watched.idle = False
        for watched in self._watched.values() if not self._done else ():
            gradient = _values(watched.probe)
            watched.before = gradient.clone() if gradient is not None else None
            if watched.waiting:
                watched.as_left = base.same_values(gradient, watched.used)
            elif gradient is None or not gradient.any():
                watched.stale = False  # what an earlier pass left there by the way was cleared after all

    def _after(self) -> None:
        for watched in self._watched.values() if not self._done else ():
            gradient = _values(watched.probe)
            if gradient is None or base.same_values(gradient, watched.before):
                continue  # this pass did not reach it
            watched.gathered += 1
            if watched.waiting:
                watched.waiting, watched.stale = False, watched.as_left

    def _zero_grad(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watched = self._watched.get(optimizer)
        if watched is not None:
            watched.idle = True
            if watched.gathered:
                watched.lost_at, watched.gathered = places.here(), 0
        return real(optimizer, *args, **kwargs)

    def _clip(self, real: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        mine = {id(p) for p in given}
        holding = [o for o in self._watched if any(id(p) in mine for p in base.trained_by(o))]
        place = places.here() if holding and all(_is_as_left(self._watched[o]) for o in holding) else None
        limit = kwargs.get("max_norm", args[0] if args else 0)
        if place is not None and limit != float("inf"):  # else it only measures
            self._clips[place] += 1
            if self._clips[place] == _ENOUGH:
                self._clipped_late(real.__name__, place)
        return real(given, *args, **kwargs)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped_at = places.here()
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
        watched = self._watched.setdefault(optimizer, _Watched())
        watched.idle = True
        if self._done:
            return
        if watched.probe is None:
            trained = [p for p in base.trained_by(optimizer) if _values(p) is not None]
            watched.probe = min(trained, key=lambda p: p.numel(), default=None)
        gradient = _values(watched.probe)
        kept = gradient is not None and bool(gradient.any())
        watched.used = gradient.clone() if gradient is not None and kept else None
        watched.waiting, watched.stale, watched.gathered, watched.lost_at = kept, False, 0, None

    def _clipped_late(self, name: str, place: Place) -> None:
        """No backward pass lies between the last step, or clearing, and this: what is clipped is never applied."""
        at, node = self._stepped_at, source.statement(place.file, place.line)
        plain = isinstance(node, ast.Expr | ast.Assign)
        step = source.statement(at.file, at.line) if at is not None and at.file == place.file else None
        outer = list(source.above(place.file, node)) if node is not None and plain else []
        moved = place.code
        # A condition that holds nothing else goes with it.
        while outer and isinstance(held := outer[0], ast.If) and held.body == [node] and not held.orelse:
            node, outer, moved = held, outer[1:], f"if {ast.unparse(held.test)}: {moved}"
        block = getattr(outer[0], "body", []) if outer else []
        edits: list[Edit] = []
        if node is not None and step is not None and plain and node in block and step in block:
            code = rewrite.written(place.file, node)
            edits = [rewrite.without(place.file, node), rewrite.before(place.file, step, code)]
        before = f" before line {at.line} ({at.code})" if at is not None else " before the step"
        self.report(
            "no-effect",
            f"{name} runs when no backward pass has followed the last step or clearing: the gradients that the steps "
            "apply are never clipped.",
            place,
            cause_at(place, "this clips gradients that a step has used already, or that are not there yet"),
            fix=f"Clip between the backward pass and the step: put {moved}{before}.",
            op=name,
            edits=edits,
        )

    def _never_cleared(self, stepped: Place | None) -> None:
        self._done = True
        if stepped is not None and dead_lines.uncalled(stepped.file, "zero_grad"):
            return  # that line is told of (`no_effect`)
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
        # A loss of its own for that step (the generator's, in every n-th round): what else came there is by the way.
        if any(isinstance(n, ast.Call) and source.called_name(n) == "backward" for n in ast.walk(every)):
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


def _is_as_left(watched: _Watched) -> bool:
    """Whether gradients are those that a step has used, or none: nobody has computed, or set, others."""
    gradient = _values(watched.probe)
    none = gradient is None or not gradient.any()
    return watched.idle and (none or base.same_values(gradient, watched.used))


def _values(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return base.plain_values(parameter.grad) if parameter is not None else None
