"""Optimizers and schedules that do not what they were made for: never stepped, replaced, at a learning rate of 0.

Judged at the end of a program that ended by itself: an optimizer whose parameters got gradients in pass after pass and
which never stepped; one that holds a schedule or a loaded state while another one steps its parameters; a schedule
that nothing steps; steps at a rate of exactly 0. What a cut-off run or an error left undone is let be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import holders, mends_roles, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import (
    BaseCheck,
    around,
    backward_hub,
    plain_values,
    same_values,
    trained_by,
)
from trimtab.virtual.tensor import payload_of

_PASSES = 3
"""Backward passes that give gradients to an optimizer that never steps."""


@dataclass(eq=False)
class _Optimizer:
    held: ref[Any]
    made: Place | None
    number: int
    """Which of all optimizers it is, in the order in which they were made."""
    parameters: set[int] = field(default_factory=set)
    rates: list[float] = field(default_factory=list)
    """The greatest rate of its groups, at each step."""
    loaded: Place | None = None
    probe: torch.Tensor | None = None
    """One of its parameters, and its values when it first had a gradient."""
    start: torch.Tensor | None = None
    passes: int = 0
    name: str = ""
    backward: Place | None = None
    instead: Place | None = None
    """The line that stepped another optimizer, without gradients of its own, after such a pass."""
    seen: Any = None
    """The gradient as the last backward pass left it."""
    asked: bool = False
    """Whether a scaler was asked to step it, which skips steps that are not finite."""
    fresh: bool = False
    """Whether a backward pass has reached it since its last step."""
    schedules: list[_Schedule] = field(default_factory=list)


@dataclass(eq=False)
class _Schedule:
    made: list[Place]
    """The line that made it, and those that called for it, innermost first."""
    steps: int = 0


class Roles(BaseCheck):
    """Follows optimizers and schedules from their making to the end."""

    def install(self) -> None:
        self._known: dict[int, _Optimizer] = {}
        self._gone: list[_Optimizer] = []
        self._made = 0
        self._failed = self._making = False
        self._lines: set[tuple[str, int]] = set()
        """Lines that stepped an optimizer."""
        self._stepped: Place | None = None
        self._schedules: dict[int, _Schedule] = {}
        around(torch.optim.Optimizer, "__init__", self._init)
        around(torch.optim.Optimizer, "load_state_dict", self._load)
        for kind in (LRScheduler, ReduceLROnPlateau):
            around(kind, "__init__", self._scheduled)
            around(kind, "step", self._advanced)
        around(torch.amp.GradScaler, "step", self._ask)
        register_optimizer_step_pre_hook(self._step)
        backward_hub().after.append(self._after)

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        self._failed |= error is not None
        return finding

    def _init(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, *args, **kwargs)
        if (old := self._known.pop(id(optimizer), None)) is not None:
            self._gone.append(old)
        self._made += 1
        self._known[id(optimizer)] = _Optimizer(ref(optimizer), places.here(), self._made)

    def _load(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(optimizer, *args, **kwargs)
        known = self._known.get(id(optimizer))
        if known is not None and any(optimizer.state.values()):
            known.loaded = places.here()
            known.parameters = {id(p) for p in trained_by(optimizer)}
        return result

    def _ask(self, real: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if (known := self._known.get(id(optimizer))) is not None:
            known.asked = True
        return real(scaler, optimizer, *args, **kwargs)

    def _scheduled(
        self, real: Callable[..., Any], schedule: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        outer, self._making = self._making, True
        try:
            real(schedule, optimizer, *args, **kwargs)
        finally:
            self._making = outer
        # Accelerate hands out a wrapper of an optimizer.
        known = self._known.get(id(optimizer)) or self._known.get(id(getattr(optimizer, "optimizer", None)))
        if known is not None and not outer:
            lines = [source.place(f.f_code.co_filename, f.f_lineno) for f in places.frames()]
            self._schedules[id(schedule)] = _Schedule(lines)
            known.schedules.append(self._schedules[id(schedule)])
            known.parameters = {id(p) for p in trained_by(optimizer)}

    def _advanced(self, real: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if id(schedule) in self._schedules and not self._making:
            self._schedules[id(schedule)].steps += 1
        return real(schedule, *args, **kwargs)

    def _after(self) -> None:
        for known in self._known.values():
            optimizer = known.held()
            if optimizer is None or (known.rates and known.fresh):
                continue
            if known.probe is None or known.probe.grad is None:
                known.probe = next((p for p in trained_by(optimizer) if p.grad is not None), None)
                values = plain_values(known.probe)
                known.start = values.clone() if values is not None else None
            gradient = known.probe.grad if known.probe is not None else None
            values = plain_values(gradient)
            # A pass that does not reach it leaves its gradient as it was.
            kept: Any = payload_of(gradient) if gradient is not None else None
            now = (id(kept), kept._version, float(values.sum())) if values is not None else None
            reached, known.seen = now is not None and now != known.seen, now
            known.fresh |= reached
            if reached and not known.rates and known.passes < _PASSES:
                known.passes += 1
                known.parameters = {id(p) for p in trained_by(optimizer)}
                frames = list(places.frames())
                known.backward = places.here()
                names = (holders.expression_for(optimizer, frame) for frame in frames[:1])
                known.name = next((name for name in names if name), known.name)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        known = self._known.get(id(optimizer))
        if known is None:
            return
        place = places.here()
        if place is not None:
            self._lines.add((place.file, place.line))
        self._stepped = place
        for other in self._known.values():
            if other is not known and other.fresh and not other.rates and not known.fresh:
                other.instead = place
        if not known.rates:
            known.parameters = {id(p) for p in trained_by(optimizer)}
        known.fresh = False
        rates = [group.get("lr") for group in optimizer.param_groups]
        known.rates.append(max((float(r) for r in rates if isinstance(r, int | float)), default=1.0))

    def finish(self) -> None:
        if self._failed or self.process.cut_off or self.process.settings.shapes_only:
            return
        made = [*self._gone, *self._known.values()]
        for known in made:
            successor = next((o for o in made if o.rates and _takes_over(o, known)), None)
            if not known.rates and successor is not None:
                self._replaced(known, successor)
            elif not known.rates and known.passes >= _PASSES:
                self._never_stepped(known)
            elif known.rates:
                self._rate(known)
                self._unstepped(known)

    def _replaced(self, known: _Optimizer, successor: _Optimizer) -> None:
        stepped = next((s for s in known.schedules if s.steps), None)
        place = stepped.made[0] if stepped is not None and stepped.made else known.loaded
        if place is None or successor.made is None or known.made is None:
            return
        what = "is stepped for" if stepped is not None else "is loaded into"
        thing = "A schedule" if stepped is not None else "The state of an optimizer"
        change, fix, edits = mends_roles.after_successor(place, successor.made)
        self.report(
            "no-effect",
            f"{thing} {what} an optimizer that never steps: another one, made at line {successor.made.line}, has taken "
            "over its parameters.",
            place,
            cause_at(
                change,
                f"this belongs to the optimizer of line {known.made.line}, which is replaced afterwards",
            ),
            fix=fix,
            op="optimizer.step",
            once=f"{place.file}:{place.line}",
            edits=edits,
        )

    def _never_stepped(self, known: _Optimizer) -> None:
        if known.backward is None or known.asked or not same_values(known.start, plain_values(known.probe)):
            return
        steps = any(k.rates for k in self._known.values())
        if known.made is None or (not steps and mends_roles.reads_gradients(known.backward.file)):
            return
        change, fix, edits = mends_roles.stepped(known.backward, known.name, known.instead)
        if mends_roles.steps_elsewhere(known.made, known.name) and steps:
            return  # it waits for a condition of its own
        self.report(
            "no-effect",
            f"The optimizer of line {known.made.line} never steps, though its parameters get gradients in every pass: "
            "they stay as they were.",
            known.backward,
            cause_at(change, "after this backward pass that optimizer is not stepped"),
            fix=fix,
            op="optimizer.step",
            once=f"{known.made.file}:{known.made.line}",
            edits=edits,
        )

    def _rate(self, known: _Optimizer) -> None:
        """Steps at a rate of 0: all of them, or all after some moment."""
        used = next((n for n in range(len(known.rates), 0, -1) if known.rates[n - 1] != 0), 0)
        idle = len(known.rates) - used
        if idle < 3 or 10 * idle < len(known.rates):
            return
        lines = known.schedules[-1].made if known.schedules else [known.made] if known.made else []
        if not lines or (not known.schedules and mends_roles.is_zero_by_hand(lines[0].file)):
            return
        often = known.schedules[-1].steps // len(known.rates) if known.schedules else 1
        place, fix, edits = mends_roles.longer(lines, used, len(known.rates), self._stepped, often)
        when = f"The last {idle} of {len(known.rates)}" if used else f"All {idle}"
        self.report(
            "no-effect",
            f"{when} steps have a learning rate of 0 and change nothing.",
            self._stepped,
            cause_at(
                place,
                "this sets the rate"
                + (f", which is 0 from step {used + 1} on" if used else ", and it stays 0"),
            ),
            fix=fix,
            op="optimizer.step",
            once="rate",
            edits=edits,
        )

    def _unstepped(self, known: _Optimizer) -> None:
        idle = [s for s in known.schedules if s.made]
        if (
            not idle
            or any(s.steps for s in known.schedules)
            or len(known.rates) < 2
            or len(set(known.rates)) > 1
        ):
            return
        place = idle[0].made[0]
        files = {line.file for line in idle[0].made} | {file for file, _ in self._lines}
        if self._stepped is None or mends_roles.other_steps(files, self._lines):
            return
        fix, edits = mends_roles.schedule_stepped(place, self._stepped)
        self.report(
            "no-effect",
            f"A schedule is made and never stepped: all {len(known.rates)} steps have the same learning rate.",
            self._stepped,
            cause_at(place, "nothing calls step() of this schedule"),
            fix=fix,
            op="scheduler.step",
            once="schedule",
            edits=edits,
        )


def _takes_over(later: _Optimizer, known: _Optimizer) -> bool:
    """Whether an optimizer made later holds the same parameters, and is no part of what wraps it."""
    if later.number <= known.number or 2 * len(later.parameters & known.parameters) <= len(known.parameters):
        return False
    one, other = later.held(), known.held()
    if one is None or other is None:
        return True
    groups = {id(group) for group in one.param_groups}
    return not any(id(group) in groups for group in other.param_groups) and not any(
        value is one for value in vars(other).values()
    )
