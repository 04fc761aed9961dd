"""A loss that is kept with its graph from step to step: memory grows until it runs out.

A mark is laid into the graph of every loss that was sent backward. Marks of several earlier steps that are still
alive mean that somebody holds their graphs.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.diagnose import flow, mends_graph, shared_graph, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, backward_hub, place_born, trained_by
from trimtab.virtual import origin

_ENOUGH = 3
"""Earlier steps whose graphs must be alive at once."""
_ENOUGH_WITHOUT_OPTIMIZER = 5
_FIRST_LOOK, _SECOND_LOOK = 4, 10
"""Passes of a model in eval mode, with gradients on, before which is looked at what is kept."""
_NAME = "trimtab_backward"
_SEEN = "trimtab_evaluation"


class _Mark:
    """Lives as long as the graph node that it is laid into."""

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: int) -> None:
        self.step = step


class GraphKept(BaseCheck):
    """Counts the steps whose graphs outlive them, for each line that calls backward."""

    def install(self) -> None:
        self._marks: dict[tuple[str, int] | None, deque[ref[_Mark]]] = defaultdict(lambda: deque(maxlen=64))
        self._steps = 0
        self._passes = 0
        self._done = False
        self._suspected: tuple[Place, int] | None = None
        """What evaluation keeps; not yet a fault, since a later backward pass may be what it is kept for."""
        self._places: deque[Place] = deque(maxlen=8)
        self._root: Place | None = None
        self._changed: set[int] = set()
        """Parameters that were stepped since the last backward pass, and (next) between the two before."""
        self._last_changed: set[int] = set()
        self._evaluated: dict[int, int] = {}
        self._before: dict[tuple[str, int], int] = {}
        backward_hub().before.append(self._backward)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_post_hook(self._stepped)

    def _forward(self, module: nn.Module, args: Any) -> None:
        """Look twice at what is kept while a model in eval mode runs with gradients on."""
        if self._done or module.training or not torch.is_grad_enabled():
            return
        count = self._evaluated[id(module)] = self._evaluated.get(id(module), 0) + 1
        if count == _FIRST_LOOK:
            self._before = _kept_by_line()
        elif count == _SECOND_LOOK:
            for line, kept in _kept_by_line().items():
                if kept >= self._before.get(line, kept) + _SECOND_LOOK - _FIRST_LOOK:
                    _mark_made_at(line)
                    self._suspected = (source.place(*line), kept)
                    return

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """A graph that is used twice: the line of the earlier pass, or the loss that is built only once."""
        if finding.kind != "graph-kept" or "second time" not in finding.message:
            return finding
        where, cause = finding.where, finding.cause
        if where is None or not finding.vague:
            return finding
        earlier = next((place for place in reversed(self._places) if place != where), None)
        if earlier is not None:
            if (
                error is not None
                and (said := shared_graph.shared(error, earlier, self._last_changed)) is not None
            ):
                return replace(finding, cause=said.cause, fix=said.fix, edits=said.edits)
            why = "this pass frees the graph that the later one needs too"
            return replace(finding, cause=cause_at(earlier, why))
        return replace(finding, cause=cause_at(self._root, "built once, and sent backward again") or cause)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self._changed |= {id(parameter) for parameter in trained_by(optimizer)}

    def _backward(self, roots: list[torch.Tensor], place: Place | None) -> None:
        if place is not None:
            self._places.append(place)
        # The failing pass is announced before it fails: what was stepped since the one before it counts.
        self._changed, self._last_changed = set(), self._changed
        self._root = place_born(roots[0]) if roots else None
        if self._done:
            return
        if self._suspected is not None:
            self._judge(roots)
        self._passes += 1
        key = (place.file, place.line) if place else None
        marks = self._marks[key]
        step = self._steps if self._steps else self._passes
        alive = {mark.step for mark in (r() for r in marks) if mark is not None and mark.step < step}
        if len(alive) >= (_ENOUGH if self._steps else _ENOUGH_WITHOUT_OPTIMIZER):
            self._report(place, len(alive))
        mark = _Mark(step)
        laid = False
        for root in roots:
            for node in _top(root.grad_fn, 6):
                laid |= node.metadata.setdefault(_NAME, mark) is mark
        if laid:
            marks.append(ref(mark))

    def _judge(self, roots: list[torch.Tensor]) -> None:
        suspected, self._suspected = self._suspected, None
        wanted = any(_SEEN in (node.metadata or ()) for root in roots for node in _top(root.grad_fn, 4000))
        if suspected is not None and not wanted:
            self._report_evaluation(*suspected)

    def finish(self) -> None:
        if not self._done:
            self._judge([])

    def _report_evaluation(self, place: Place, kept: int) -> None:
        self._done = True
        self.report(
            "graph-kept",
            f"A model in eval mode runs with gradients on, and {kept} of its results are kept with their graphs: "
            "memory grows with every batch.",
            place,
            cause_at(place, "results of this line are kept, each with the graph of its batch"),
            fix="Evaluate inside `with torch.no_grad():`, or keep out.detach().",
            op="forward",
        )

    def _report(self, place: Place | None, count: int) -> None:
        holder = _holder()
        called, name = _kept_by_call() if holder is None else (None, "")
        kept_at = called or (place_born(holder) if holder is not None else _kept_in_list())
        if kept_at is not None and place is not None and kept_at == place:
            kept_at = None
        self._done = True
        mend = mends_graph.of_kept(kept_at, name)
        fix, edits = mend or ("Keep the number, not the graph: total += loss.detach() (or loss.item()).", [])
        why = "what is kept here holds the graph of its step" if called else ""
        self.report(
            "graph-kept",
            f"The graphs of {count} earlier steps are still alive: a tensor that is kept across steps holds the graph "
            "of every step, and memory grows until it runs out.",
            kept_at or place,
            cause_at(kept_at, why or "the running value is built from the loss with its graph")
            or cause_at(place, "the loss of every step is kept with its graph"),
            fix=fix,
            op="backward",
            edits=edits,
        )


def _kept_by_line() -> dict[tuple[str, int], int]:
    """How many living results with a graph were made at each line of the user's code."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for _, line in _results():
        counts[line] += 1
    return counts


def _mark_made_at(line: tuple[str, int]) -> None:
    """Lay a mark into the graphs of the living results that a line made."""
    for result, made in _results():
        if made == line:
            result.grad_fn.metadata[_SEEN] = True


def _with_graph() -> Iterator[Any]:
    """The living tensors that have a graph."""
    return (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.grad_fn is not None)


def _results() -> Iterator[tuple[Any, tuple[str, int]]]:
    """Living tensors with a graph, and their lines. A view of a parameter (a graph keeps many) was made with it."""
    for thing in _with_graph():
        born = origin.born_of(thing)
        if born is not None and not (thing._base is not None and thing._base.is_leaf):
            yield thing, (born.file, born.line)


def _kept_in_list() -> Place | None:
    """The line that puts losses into a list which a function on the stack holds by name."""
    for frame in places.frames():
        for name, value in frame.f_locals.items():
            if _keeps(value):
                return flow.appending_line(frame.f_code.co_filename, name)
            if isinstance(value, nn.Module | torch.Tensor) or not hasattr(value, "__dict__"):
                continue
            for attribute, kept in list(vars(value).items()):
                if _keeps(kept) and (line := flow.appending_line(frame.f_code.co_filename, attribute)):
                    return line
    return None


def _kept_by_call() -> tuple[Place | None, str]:
    """The line that hands a tensor with its graph to an object that keeps it, and the tensor's name there."""
    for frame in places.frames():
        for name, owner in list(frame.f_locals.items()):
            if isinstance(owner, nn.Module | torch.Tensor) or not hasattr(owner, "__dict__"):
                continue
            kept = [
                item for value in list(vars(owner).values()) for item in _parts(value) if _is_marked(item)
            ]
            if len(kept) < 2:
                continue
            lines = {place_born(item) for item in kept if isinstance(item, torch.Tensor)} - {None}
            # This round's own value is not kept yet, but it was made at the same line as those that are.
            given = {
                own
                for own, value in frame.f_locals.items()
                if isinstance(value, torch.Tensor) and place_born(value) in lines
            }
            for call in source.calls(frame.f_code.co_filename):
                if source.root(call.func) == name:
                    named = [a.id for a in call.args if isinstance(a, ast.Name) and a.id in given]
                    if named:
                        return source.place(frame.f_code.co_filename, call.lineno), named[0]
    return None, ""


def _parts(value: object) -> Iterator[object]:
    """What a list keeps, and what the tuples and dicts in it do."""
    for item in value if isinstance(value, list | deque) else ():
        if isinstance(item, tuple | list):
            yield from item
        elif isinstance(item, dict):
            yield from item.values()
        else:
            yield item


def _keeps(value: object) -> bool:
    if isinstance(value, dict):
        return any(_keeps(entry) for entry in list(value.values())[:64])
    return isinstance(value, list | deque) and sum(_is_marked(item) for item in value) > 1


def _is_marked(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return False
    return any(_NAME in (node.metadata or ()) for node in _top(value.grad_fn, 6))


def _top(node: Any, most: int) -> list[Any]:
    """The first nodes of a graph, leaves (which live as long as their parameters) left out."""
    queue: deque[Any] = deque([node])
    found: list[Any] = []
    seen: set[Any] = set()
    while queue and len(found) < most:
        node = queue.popleft()
        if node is None or node in seen or "AccumulateGrad" in node.name():
            continue
        seen.add(node)
        found.append(node)
        queue.extend(following for following, _ in node.next_functions)
    return found


def _holder() -> torch.Tensor | None:
    """The living tensor from which most marked steps can be reached."""
    best: tuple[int, torch.Tensor] | None = None
    for thing in _with_graph():
        marked = [node for node in _top(thing.grad_fn, 200) if _NAME in (node.metadata or ())]
        steps = {node.metadata[_NAME].step for node in marked}
        if steps and (best is None or len(steps) > best[0]):
            best = (len(steps), thing)
    return best[1] if best and best[0] > 1 else None
