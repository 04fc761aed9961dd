"""A loss that is kept with its graph from step to step: memory grows until it runs out.

A mark is laid into the graph of every loss that was sent backward. Marks of several earlier steps that are still
alive mean that somebody holds their graphs.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.diagnose import graphs, holders, kept, mends_graph, shared_graph, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.diagnose.rules_common import Verdict
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, backward_hub, optimizers_made, place_born, trained_by
from trimtab.virtual import origin

_ENOUGH = 3
"""Earlier steps whose graphs must be alive at once."""
_ENOUGH_UNSURE = 5
"""The same without an optimizer, and of graphs below the loss: layers that take turns may keep one each."""
_FIRST_LOOK, _SECOND_LOOK = 4, 10
"""Passes of a model in eval mode, with gradients on, before which is looked at what is kept."""
_DEEP, _SHALLOW, _DEEP_UNTIL = 512, 6, 16
"""Nodes of a graph that are marked: many in the first passes, so that a kept activation shows, then few."""
_FAR = 2000
_BETWEEN = 4
"""Passes between two looks for circles, which take their time."""
_LINE = "trimtab_line"
_CHAIN_LOOKS = (3, 6)
"""Optimizer steps after which is looked at values that are built on themselves."""
_EVALUATED = (
    "A model in eval mode runs with gradients on, and its results are kept with their graphs: memory grows with every "
    "batch."
)
_NAME = "trimtab_backward"
_SEEN = "trimtab_evaluation"


class _Mark:
    """Lives as long as the graph node that it is laid into."""

    __slots__ = ("__weakref__", "number", "place", "step")

    def __init__(self, step: int, number: int, place: Place | None) -> None:
        self.step, self.number, self.place = step, number, place


class GraphKept(BaseCheck):
    """Counts the steps whose graphs outlive them, for each line that calls backward."""

    def install(self) -> None:
        self._made = optimizers_made()
        self._marks: dict[tuple[Any, bool], deque[ref[_Mark]]] = defaultdict(lambda: deque(maxlen=64))
        """By the line that calls backward, and whether the marks lie deep in the graph."""
        self._steps = 0
        self._passes = 0
        self._cleared = -_BETWEEN
        """The pass before which was looked for circles last."""
        self._done = False
        self._suspected: tuple[Place, mends_graph.Mend, str] | None = None
        """What is kept, the mend, the message; not yet a fault: a later backward pass may be what it is kept for."""
        self._looked: set[int] = set()
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
            _remember_lines()
        elif count == _SECOND_LOOK:
            for line, now in _kept_by_line().items():
                many = now >= self._before.get(line, now) + _SECOND_LOOK - _FIRST_LOOK
                if many or _built_on_itself(line):
                    _mark_made_at(line)
                    frames = list(places.frames())
                    mend = mends_graph.of_evaluation(frames)
                    self._suspected = (_outside(line, frames), mend, _EVALUATED)
                    return

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """A graph that is used twice: the line of the earlier pass, or the loss that is built only once."""
        if finding.kind != "graph-kept" or "second time" not in finding.message:
            return finding
        where, cause = finding.where, finding.cause
        if where is None or not finding.vague:
            return finding
        said = self._shared(error) if error is not None else None
        if said is not None:
            return replace(finding, cause=said.cause, fix=said.fix, edits=said.edits)
        earlier = next((place for place in reversed(self._places) if place != where), None)
        if earlier is not None:
            why = "this pass frees the graph that the later one needs too"
            return replace(finding, cause=cause_at(earlier, why))
        return replace(finding, cause=cause_at(self._root, "built once, and sent backward again") or cause)

    def _shared(self, error: BaseException) -> Verdict | None:
        """What the failing pass has in common with earlier ones, by the marks that those left in its graph."""
        root = shared_graph.failing_root(error)
        nodes = _top(root.grad_fn, _FAR) if root is not None else []
        marks = [(node, node.metadata[_NAME]) for node in nodes if _NAME in node.metadata]
        freed = {node: mark.place for node, mark in marks if mark.number < self._passes}
        earlier = next(iter(freed.values()), None)
        return shared_graph.shared(error, set(freed), earlier, self._last_changed) if earlier else None

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
        if self._steps in _CHAIN_LOOKS and self._steps not in self._looked:
            self._look_at_chains()
        self._passes += 1
        key = (place.file, place.line) if place else None
        # All passes before an optimizer's first step are one step: micro-batches of a pipeline, gathered gradients.
        step = self._steps if self._steps or self._made else self._passes
        for deep, enough in ((False, _ENOUGH if self._steps else _ENOUGH_UNSURE), (True, _ENOUGH_UNSURE)):
            if len(alive := self._alive(key, deep, step, enough)) >= enough:
                self._report(place, len(alive))
                return
        self._lay(roots, key, step, place)

    def _alive(self, key: Any, deep: bool, step: int, enough: int) -> set[int]:
        """Earlier steps whose graphs live. What Python clears away by itself, circles among them, nobody keeps."""

        def there() -> set[int]:
            marks = (mark for mark in (r() for r in self._marks[key, deep]) if mark is not None)
            return {mark.step for mark in marks if mark.step < step}

        alive = there()
        if len(alive) < enough or self._passes < self._cleared + _BETWEEN:
            return alive if len(alive) < enough else set()
        gc.collect()
        self._cleared = self._passes
        return there()

    def _lay(
        self, roots: list[torch.Tensor], key: tuple[str, int] | None, step: int, place: Place | None
    ) -> None:
        top, below = _Mark(step, self._passes, place), _Mark(step, self._passes, place)
        most = _DEEP if self._passes <= _DEEP_UNTIL else _SHALLOW
        laid = {False: False, True: False}
        for root in roots:
            for count, node in enumerate(_top(root.grad_fn, most)):
                deep = count >= _SHALLOW
                mark = below if deep else top
                laid[deep] |= node.metadata.setdefault(_NAME, mark) is mark
        for deep, mark in ((False, top), (True, below)):
            if laid[deep]:
                self._marks[key, deep].append(ref(mark))

    def _look_at_chains(self) -> None:
        """Values that go on from their own last one over several steps, as averages of weights do."""
        self._looked.add(self._steps)
        if self._steps == _CHAIN_LOOKS[0]:
            _remember_lines()
            return
        for line in dict.fromkeys(line for _, line in _results()):
            found = kept.built(source.place(*line))
            if found is not None and _built_on_itself(line):
                _mark_made_at(line)
                place, fix, edits = found
                said = (
                    "A value is built from its own last one with its graph: the graph grows with every step."
                )
                self._suspected = (place, (fix, edits), said)
                return

    def _judge(self, roots: list[torch.Tensor]) -> None:
        suspected, self._suspected = self._suspected, None
        wanted = any(_SEEN in (node.metadata or ()) for root in roots for node in _top(root.grad_fn, 4000))
        if suspected is not None and not wanted:
            self._report_useless(*suspected)

    def finish(self) -> None:
        if not self._done:
            self._judge([])

    def _report_useless(self, place: Place, mend: mends_graph.Mend, message: str) -> None:
        self._done = True
        fix, edits = mend
        why = "results of this line are kept with their graphs, and no loss needs them"
        self.report("graph-kept", message, place, cause_at(place, why), fix=fix, op="forward", edits=edits)

    def _report(self, place: Place | None, count: int) -> None:
        frames = list(places.frames())
        holder, alone = _holders()
        found = kept.carried(_reaches_several, frames) if holder is not None else None
        if found is None and holder is not None and (born := place_born(holder)) is not None:
            found = kept.built(born)
        found = found or kept.handed_over(_is_marked, frames)
        for one in alone if found is None else ():
            found = found or kept.stored(one, frames)
        kept_at, fix, edits = found or (None, "Keep the number, not the graph: .detach() or .item().", [])
        if kept_at is not None and place is not None and kept_at == place:
            kept_at = None
        self._done = True
        self.report(
            "graph-kept",
            f"The graphs of {count} earlier steps are still alive: a tensor that is kept across steps holds the graph "
            "of every step, and memory grows until it runs out.",
            kept_at or place,
            cause_at(kept_at, "what is kept here holds the graph of its step")
            or cause_at(place, "the loss of every step is kept with its graph"),
            fix=fix,
            op="backward",
            edits=edits,
        )


def _outside(line: tuple[str, int], frames: list[FrameType]) -> Place:
    """Where what a line makes is kept: of a line inside the model, that which calls the model."""
    called = holders.outside(frames) if source.class_at(*line) is not None else None
    return source.place(*line) if called is None else source.place(called.f_code.co_filename, called.f_lineno)


def _kept_by_line() -> dict[tuple[str, int], int]:
    """How many living results with a graph were made at each line of the user's code."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for _, line in _results():
        counts[line] += 1
    return counts


def _remember_lines() -> None:
    """Lay the line that made it into the graph of every living result."""
    for result, line in _results():
        result.grad_fn.metadata.setdefault(_LINE, line)


def _built_on_itself(line: tuple[str, int]) -> bool:
    """Whether a result that is new since lines were remembered was made from what the same line gave then."""
    new = [result for result, made in _results() if made == line and _LINE not in result.grad_fn.metadata]
    return any((node.metadata or {}).get(_LINE) == line for one in new for node in _top(one.grad_fn, _FAR))


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


def _is_marked(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return False
    return any(_NAME in (node.metadata or ()) for node in _top(value.grad_fn, _SHALLOW))


def _top(node: Any, most: int) -> list[Any]:
    """The first nodes of a graph, leaves (which live as long as their parameters) left out."""
    nodes = (n for n in graphs.distances(node, 2 * most) if "AccumulateGrad" not in n.name())
    return list(itertools.islice(nodes, most))


def _reaches_several(value: object) -> bool:
    """Whether a tensor's graph goes back over more than one marked step."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return False
    return len(_steps_behind(value)) > 1


def _steps_behind(tensor: torch.Tensor) -> set[int]:
    """The marked steps to which a tensor's graph goes back."""
    nodes = (node for node in _top(tensor.grad_fn, _FAR) if _NAME in (node.metadata or ()))
    return {node.metadata[_NAME].step for node in nodes}


def _holders() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The living tensor from which several marked steps can be reached, and those that hold one earlier step each."""
    best: tuple[int, torch.Tensor] | None = None
    alone: list[tuple[int, torch.Tensor]] = []
    for thing in _with_graph():
        steps = _steps_behind(thing)
        if len(steps) > 1 and (best is None or len(steps) > best[0]):
            best = (len(steps), thing)
        elif steps:
            alone.append((min(steps), thing))
    earliest = sorted(alone, key=lambda pair: pair[0])[:8]
    return best[1] if best is not None else None, [thing for _, thing in earliest]
