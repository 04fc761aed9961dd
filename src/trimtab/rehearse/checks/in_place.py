"""In-place changes of tensors that backward still needs: torch names the tensor's shape, this names the line."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, deque
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.diagnose import mends_in_place, shared_graph, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.diagnose.mends_in_place import Filled
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, trained_by
from trimtab.virtual import functions

_TEXT = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\](?:, which is output \d+ of (\w+))?"
)
_AUGMENTED = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"))


class _Change(NamedTuple):
    """One in-place change of a tensor in a graph."""

    shape: tuple[int, ...]
    place: Place
    filled: Filled
    made_by: str
    """The node that had made what was changed."""
    module: nn.Module | None
    """The layer that was told to work in place, where one did it."""


class InPlace(BaseCheck):
    """Remembers the last in-place changes of tensors in a graph, and the optimizers' steps."""

    def install(self) -> None:
        self._changes: deque[_Change] = deque(maxlen=64)
        self._steps: deque[tuple[set[tuple[int, ...]], Place]] = deque(maxlen=8)
        functions.AFTER.append(self._after)
        register_optimizer_step_post_hook(self._stepped)

    def _after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, told = getattr(func, "__name__", ""), kwargs.get("inplace") is True
        changes = (name.endswith("_") and not name.startswith("_")) or name in _AUGMENTED or told
        if not changes or not args or not isinstance(args[0], torch.Tensor) or not torch.is_grad_enabled():
            return
        node: Any = args[0].grad_fn
        if node is not None or name == "__setitem__":
            place = places.here()
            before = node.next_functions[0][0] if node is not None and node.next_functions else None
            made_by = before.name() if before is not None else ""
            module = _layer() if told else None
            if place is not None:
                shape = tuple(args[0].shape)
                self._changes.append(_Change(shape, place, _filled(name, args), made_by, module))

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        place = places.here()
        if place is not None:
            shapes = {_unordered(parameter.shape) for parameter in trained_by(optimizer)}
            self._steps.append((shapes, place))

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """Match the shape that the error names."""
        if (found := _TEXT.search(finding.message)) is None:
            return finding
        shape = tuple(int(n) for n in found[1].split(",") if n.strip())
        alike = [change for change in reversed(self._changes) if change.shape == shape]
        # Of a layer that works in place, as many do without harm, the node must be the one that torch names.
        named = [c for c in alike if found[2] and c.made_by.startswith(found[2])]
        for change in named or [c for c in alike if c.module is None]:
            why = "this changes in place a tensor that backward still needs"
            place, mend = change.place, mends_in_place.out_of_place(change.place, change.filled)
            if change.module is not None:
                made = mends_in_place.of_layer(change.module)
                place, mend = made or (place, None)
            fix, edits = mend or (finding.fix, [])
            return replace(finding, cause=cause_at(place, why), fix=fix, edits=edits)
        for shapes, place in reversed(self._steps):
            if _unordered(shape) in shapes:
                why = "this step changes weights in place, and a graph made before it is used afterwards"
                at = finding.where
                loss = shared_graph.loss_name(at.file, at.line) if at is not None else "the later loss"
                fix = (
                    f"Compute {loss} after this step, or send it backward before it: its graph holds the weights as "
                    "they were."
                )
                swapped = mends_in_place.stepped_later(error, place) if error is not None else None
                fix, edits = swapped or (fix, [])
                return replace(finding, cause=cause_at(place, why), fix=fix, edits=edits)
        # A part of a tensor that is filled piece by piece: torch names the shape of the part.
        for changed, place, *_ in reversed(self._changes):
            node = source.statement(place.file, place.line)
            writes = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
            if writes and shape and not Counter(shape) - Counter(changed):
                why = "this writes into a tensor of which backward still needs other parts as they were"
                fix, edits = mends_in_place.out_of_place(place) or (finding.fix, [])
                return replace(finding, cause=cause_at(place, why), fix=fix, edits=edits)
        return finding


def _layer() -> nn.Module | None:
    """The layer of torch's that runs now, below the program's own line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not source.is_user_file(frame.f_code.co_filename):
        if isinstance(layer := frame.f_locals.get("self"), nn.Module) and getattr(layer, "inplace", False):
            return layer
        frame = frame.f_back
    return None


def _filled(name: str, args: tuple[Any, ...]) -> Filled:
    """Whether a number is written into the tensor: where a mask of its own shape says so, or into any other part."""
    if name != "__setitem__" or len(args) != 3 or not isinstance(args[2], int | float):
        return ""
    mask = args[1]
    whole = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == args[0].shape
    return "mask" if whole else "part"


def _unordered(shape: Any) -> tuple[int, ...]:
    return tuple(sorted(shape))
