"""What is gathered from all ranks comes back without a graph: features that only go on so are never trained through.

`all_gather` copies values. Speaks where a line of the program gathers, in training, what has a graph, and where the
backward passes that follow never reach that graph: whoever puts the own part back, or uses it beside, reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import mends_results
from trimtab.diagnose.finding import Cause, Finding, Place, cause_at
from trimtab.diagnose.graphs import distances
from trimtab.rehearse import exchanges
from trimtab.rehearse.checks.base import BaseCheck, backward_hub, world_size

_GATHERS = frozenset(("all_gather", "all_gather_into_tensor", "_allgather_base", "_allgather_base_"))
_ENOUGH = 2
"""Backward passes that miss it from which on it is no chance."""


@dataclass
class _Line:
    """A line that gathers what has a graph."""

    place: Place
    waiting: Any = None
    """The node behind what was gathered last, until a backward pass has come."""
    missed: int = 0
    reached: bool = False


class Gathered(BaseCheck):
    """Follows what is gathered to the next backward pass."""

    def install(self) -> None:
        self._lines: dict[tuple[str, int], _Line] = {}
        self._training = False
        self._passed: set[Any] = set()
        """The nodes of the last backward pass: what is gathered of them afterwards is only looked at."""
        exchanges.listeners.append(self._look)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        backward_hub().before.append(self._before)

    def _forward(self, module: nn.Module, args: Any) -> None:
        self._training = module.training

    def _look(self, op: str, tensors: list[torch.Tensor], place: Place) -> None:
        given = tensors[-1] if tensors else None
        if op not in _GATHERS or given is None or given.grad_fn is None or world_size() < 2:
            return
        if self._training and torch.is_grad_enabled() and self._passed.isdisjoint(distances(given.grad_fn)):
            line = self._lines.setdefault((place.file, place.line), _Line(place))
            line.waiting = given.grad_fn

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        if not exchanges.ran:
            return
        nodes = {node for root in roots for node in distances(root.grad_fn)}
        # Those of the parameters stand in every graph.
        self._passed = {node for node in nodes if not hasattr(node, "variable")}
        waiting = [line for line in self._lines.values() if line.waiting is not None and not line.reached]
        for line in waiting:
            line.reached = line.waiting in self._passed
            line.missed += not line.reached
            line.waiting = None

    def _missing(self) -> list[_Line]:
        return [line for line in self._lines.values() if line.missed and not line.reached]

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """A loss of gathered values alone has no graph at all, and backward raises."""
        if finding.kind != "no-gradient" or not (missing := self._missing()):
            return finding
        place = missing[0].place
        missing[0].reached = True  # it is told
        fix = mends_results.with_own_part(place)
        return replace(finding, cause=_cause(place), fix=fix.text, edits=fix.edits)

    def finish(self) -> None:
        for line in self._missing():
            if line.missed < _ENOUGH:
                continue
            fix = mends_results.with_own_part(line.place)
            self.report(
                "no-gradient",
                f"What is gathered here is trained by no loss: in {line.missed} backward passes none reached what this "
                "rank put in.",
                line.place,
                _cause(line.place),
                fix.text,
                "all_gather",
                edits=fix.edits,
            )


def _cause(place: Place) -> Cause | None:
    return cause_at(place, "gathering copies values and leaves their graph behind, this rank's own too")
