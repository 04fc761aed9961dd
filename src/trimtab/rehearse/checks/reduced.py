"""Results of collectives that come to nothing: written into a tensor that nobody holds, all parts into one tensor, a
running total that is summed over the ranks again and again. Nothing raises; the figures are wrong.

Speaks of what the program's own line hands over, and only where the run shows it: memory that no name of the line has,
one tensor several times in a list, a total to which was only added since it was last summed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ref

import torch

from trimtab.diagnose import holders, mends_results, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.diagnose.own_figures import RANK
from trimtab.rehearse import exchanges, places
from trimtab.rehearse.checks.base import BaseCheck, place_born, world_size
from trimtab.rehearse.checks.writes import writes

_ADDS = ("add_", "__iadd__")
_MADE_UP = frozenset(("zeros", "ones", "empty", "full", "rand", "randn", "arange"))
_MADE_UP |= {f"{name}_like" for name in _MADE_UP} | {f"new_{name}" for name in _MADE_UP}
_OF_FIGURES = ("tensor", "as_tensor", "Tensor", "FloatTensor", "IntTensor", "LongTensor")
_AGAIN = 3
"""Sums of one growing total from which on it is no chance."""


@dataclass
class _Total:
    """A tensor that was summed over the ranks."""

    held: ref[torch.Tensor]
    times: int = 1
    added: Place | None = None
    """Where something was added to it since; nothing else was done to it."""


class Reduced(BaseCheck):
    """Looks at what the program itself hands to collectives."""

    def install(self) -> None:
        self._totals: dict[int, _Total] = {}
        exchanges.listeners.append(self._look)
        writes().listeners.append(self._wrote)

    def _look(self, op: str, tensors: list[torch.Tensor], place: Place) -> None:
        calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) == op]
        if world_size() < 2 or len(calls) != 1 or not tensors:
            return
        if op in ("all_gather", "gather"):
            self._gathered(calls[0], tensors, place)
        elif op in ("all_reduce", "broadcast", "reduce"):
            self._lost(calls[0], tensors[0], place)
            how = source.keyword(calls[0], "op") or (calls[0].args[1] if len(calls[0].args) > 1 else None)
            if op == "all_reduce" and (how is None or ast.unparse(how).endswith("ReduceOp.SUM")):
                self._again(calls[0], tensors[0], place)

    def _gathered(self, call: ast.Call, tensors: list[torch.Tensor], place: Place) -> None:
        if len({id(tensor) for tensor in tensors[:-1]}) == len(tensors) - 1 or len(tensors) < 3:
            return
        fix = mends_results.several(place, call)
        self.report(
            "ranks-disagree",
            f"{source.called_name(call)} is given one tensor several times to write into: every part comes out as "
            "what one rank gave, and the others' are lost.",
            place,
            cause_at(fix.place, "this holds one tensor several times, not several tensors"),
            fix.text,
            source.called_name(call),
            once=f"several {place.file}:{place.line}",
            edits=fix.edits,
        )

    def _lost(self, call: ast.Call, tensor: torch.Tensor, place: Place) -> None:
        given = call.args[0] if call.args else source.keyword(call, "tensor")
        frame = next(places.frames(), None)
        if not isinstance(given, ast.Call) or frame is None or is_made_up(given):
            return
        born, node = place_born(tensor), source.statement(place.file, place.line)
        here = born is not None and born.file == place.file and source.statement(born.file, born.line) is node
        if (
            not here
            or not isinstance(node, ast.Expr)
            or node.value is not call
            or _is_shared(given, tensor, frame)
        ):
            return
        fix = mends_results.kept(place, call, given)
        self.report(
            "ranks-disagree",
            f"{source.called_name(call)} writes its result into a tensor that was made for the call and that nothing "
            "reads: every rank goes on with its own figures.",
            place,
            cause_at(place, f"`{ast.unparse(given)}` is gone after this line, and the result with it"),
            fix.text,
            source.called_name(call),
            once=f"lost {place.file}:{place.line}",
            edits=fix.edits,
        )

    def _again(self, call: ast.Call, tensor: torch.Tensor, place: Place) -> None:
        known = self._totals.get(exchanges.memory(tensor))
        if known is None or known.held() is not tensor or known.added is None:
            self._totals[exchanges.memory(tensor)] = _Total(ref(tensor))
            return
        known.times, added, known.added = known.times + 1, known.added, None
        if known.times < _AGAIN:
            return
        given = call.args[0] if call.args else call
        fix = mends_results.summed_once(place, call, added)
        self.report(
            "ranks-disagree",
            f"{ast.unparse(given)} is summed over the ranks for the {known.times}rd time, with what the last sum left "
            "in it: the earlier parts are counted once more for every rank, each time.",
            place,
            cause_at(
                place, f"the total already holds all ranks' parts, and line {added.line} only adds to it"
            ),
            fix.text,
            "all_reduce",
            once=f"again {place.file}:{place.line}",
            edits=fix.edits,
        )

    def _wrote(self, name: str, tensor: torch.Tensor, frame: FrameType) -> None:
        # By its memory: who writes to `total.data`, or to a part of it, writes to the total.
        memory = exchanges.memory(tensor) if self._totals else 0
        known = self._totals.get(memory)
        if known is not None and name in _ADDS and known.held() is tensor:
            known.added = places.here()
        elif known is not None:
            del self._totals[memory]


def is_made_up(given: ast.expr) -> bool:
    """Whether a tensor of given figures is handed over, as those do who only want the ranks to meet."""
    calls = [n for n in ast.walk(given) if isinstance(n, ast.Call)]
    # The figures of torch.tensor(1).cuda(rank) are 1.
    figures = next((n.args[0] for n in calls if source.called_name(n) in _OF_FIGURES and n.args), given)
    read = {n.id for n in ast.walk(figures) if isinstance(n, ast.Name)} - {"torch", "device"}
    made_up = not _MADE_UP.isdisjoint(source.called_name(n) for n in calls)
    return made_up or all(RANK.search(name) for name in read)


def _is_shared(given: ast.expr, tensor: Any, frame: FrameType) -> bool:
    """Whether something that the line names holds the same memory."""
    values = [holders.value_of(n, frame) for n in ast.walk(given) if isinstance(n, ast.Name | ast.Attribute)]
    memory = exchanges.memory(tensor)
    held = [value for value in values if isinstance(value, torch.Tensor)]
    return not memory or any(exchanges.memory(value) == memory for value in held)
