"""Iterators that are used up and used again: a generator of parameters that is clipped, batches for the second epoch.

Nothing raises: the second use sees nothing. What was used up is proven by the run, not by reading the source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import holders, mends_data, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, optimizers_made, trained_by

_LOOKED_AT = 8
"""Different lines that step, of which the loops are looked at."""


@dataclass
class _Rounds:
    """A loop over an iterator that was made before the loop around it began."""

    frame: FrameType
    name: str
    made: Place
    loop: Place
    counter: str
    last: Any
    """Which round of the outer loop it was at the last step."""


class Consumed(BaseCheck):
    """Looks at what is clipped, and at the loops around steps."""

    def install(self) -> None:
        self._made = optimizers_made()
        self._rounds: dict[tuple[str, int], list[_Rounds]] = {}
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            around(nn.utils, name, self._clip)
            setattr(nn.utils.clip_grad, name, getattr(nn.utils, name))
        register_optimizer_step_pre_hook(self._step)

    def _clip(self, real: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not given and any(p.grad is not None for optimizer in self._made for p in trained_by(optimizer)):
            self._clips_nothing(real.__name__)
        return real(given, *args, **kwargs)

    def _clips_nothing(self, name: str) -> None:
        frame = next(places.frames(), None)
        if frame is None:
            return
        place = source.place(frame.f_code.co_filename, frame.f_lineno)
        for call in source.call_on(place.file, place.line):
            if source.called_name(call) != name or not call.args or not _is_iterator(call.args[0], frame):
                continue
            made, fix, edits = mends_data.kept_as_list(place, call.args[0])
            self.report(
                "used-up",
                f"{name} is given an iterator that was used up before: no gradient is clipped.",
                place,
                cause_at(made, f"{ast.unparse(call.args[0])} can be gone through once only"),
                fix=fix,
                op=name,
                once=name,
                edits=edits,
            )

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for frame in places.frames():
            key = (frame.f_code.co_filename, frame.f_lineno)
            if key not in self._rounds and len(self._rounds) < _LOOKED_AT:
                self._rounds[key] = list(_rounds(frame))
            for rounds in self._rounds.get(key, ()):
                if rounds.frame is frame:
                    rounds.last = frame.f_locals.get(rounds.counter)

    def finish(self) -> None:
        for rounds in (one for found in self._rounds.values() for one in found):
            after = rounds.frame.f_locals.get(rounds.counter)
            if self.process.cut_off or not isinstance(after, int) or after == rounds.last:
                continue
            name = ast.parse(rounds.name, mode="eval").body
            made, fix, edits = mends_data.kept_as_list(rounds.loop, name)
            self.report(
                "used-up",
                f"{rounds.name} is an iterator and was used up in the round {rounds.counter} = {rounds.last}: in the "
                f"later ones (up to {after}) the loop over it runs not once, and nothing is trained.",
                rounds.loop,
                cause_at(made or rounds.made, "this can be gone through once only, and every round needs it"),
                fix=fix,
                op="optimizer.step",
                once=rounds.name,
                edits=edits,
            )
        self._rounds.clear()


def _rounds(frame: FrameType) -> Iterator[_Rounds]:
    """The loops of a running function around its present line that go over an iterator made outside."""
    file = frame.f_code.co_filename
    node = source.statement(file, frame.f_lineno)
    loops = [n for n in source.above(file, node) if isinstance(n, ast.For)] if node is not None else []
    scope = source.function_at(file, frame.f_lineno)
    loops = [loop for loop in loops if source.function_at(file, loop.lineno) is scope]
    for inner, outer in pairwise(loops):
        counts = isinstance(outer.iter, ast.Call) and source.called_name(outer.iter) in ("range", "trange")
        if not counts or not isinstance(outer.target, ast.Name):
            continue
        for name in (n for n in ast.walk(inner.iter) if isinstance(n, ast.Name | ast.Attribute)):
            root = source.root(name)
            made = source.last_assignment(file, inner.lineno, root)
            inside = made is not None and outer.lineno <= made.lineno <= (outer.end_lineno or 0)
            if not inside and _is_iterator(name, frame):
                at = source.place(file, made.lineno if made is not None else inner.lineno)
                loop = source.place(file, inner.lineno)
                yield _Rounds(frame, ast.unparse(name), at, loop, outer.target.id, None)


def _is_iterator(node: ast.expr, frame: FrameType) -> bool:
    """Whether an expression stands for something that can be gone through once only."""
    value = holders.value_of(node, frame)
    return hasattr(type(value), "__next__")
