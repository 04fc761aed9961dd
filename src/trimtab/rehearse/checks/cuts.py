"""Where the graph behind a loss ends: detached tensors, numbers taken out of tensors, layers run under no_grad.

Lines are only remembered here; whether one of them is a fault is for the checks to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import flow, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.graphs import leaves
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import watch_function
from trimtab.virtual import tensor

_MARK = "_trimtab_cut"
_TENSOR = tensor.__file__
_MEANT = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
"""Made to cut."""
_NUMBERS = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.argmax,
    torch.Tensor.argmin,
    torch.Tensor.long,
    torch.Tensor.int,
    torch.argmax,
    torch.argmin,
    torch.tensor,
)
"""Cut on the way to something else: a number, a list, an index."""


@dataclass
class Cut:
    """A line that takes values out of a graph."""

    place: Place
    behind: set[int]
    """Ids of the leaves behind it."""
    meant: bool
    in_forward: bool
    fed: bool = False
    """Whether its result went into a layer."""

    @property
    def goes_on(self) -> bool:
        """Whether the result is part of the computation, not only looked at."""
        return self.in_forward or self.fed


_COMPARES = tuple(
    getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("gt", "ge", "lt", "le")
)
"""Give yes or no, which has no gradient; most are masks, and cut nothing that is wanted."""


class Cuts:
    """All cuts that the program's own lines have made, in the order in which they were first met."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Cut] = {}
        self.last: Cut | None = None
        self.compared: Cut | None = None
        """The last comparison of values that have a graph."""
        self.without_grad: dict[int, Place] = {}
        """Parameters by id whose layer ran, in training mode, with gradients switched off: the line that did so."""
        for function in (*_MEANT, *_NUMBERS):
            watch_function(function, partial(self._looked_at, function in _MEANT))
        for function in _COMPARES:
            watch_function(function, self._comparison)
        nn.modules.module.register_module_forward_pre_hook(self._forward)

    def in_front_of(self, dead: set[int]) -> Cut | None:
        """The cut that most likely keeps these parameters from their gradients."""
        found = [cut for cut in self._found.values() if cut.behind & dead]
        return min(found, key=lambda cut: (not cut.goes_on, not cut.meant), default=None)

    def _looked_at(self, meant: bool, caller: FrameType | None, args: tuple[Any, ...], result: Any) -> None:
        if caller is not None and caller.f_code.co_filename == _TENSOR:
            caller = caller.f_back
        if caller is not None and args and source.is_user_file(caller.f_code.co_filename):
            self._note(caller, args[0], result, meant)

    def _comparison(self, caller: FrameType | None, args: tuple[Any, ...], result: Any) -> None:
        given = args[0] if args else None
        if caller is None or not isinstance(given, torch.Tensor) or given.grad_fn is None:
            return
        file, line = caller.f_code.co_filename, caller.f_lineno
        known = self.compared
        if source.is_user_file(file) and (
            known is None or (known.place.file, known.place.line) != (file, line)
        ):
            behind = {id(leaf) for leaf in leaves(given)}
            self.compared = Cut(source.place(file, line), behind, meant=False, in_forward=False)

    def _note(self, caller: FrameType, given: Any, result: Any, meant: bool) -> None:
        if not isinstance(given, torch.Tensor) or not given.requires_grad:
            return
        # The values of a parameter are taken out of a layer's pass, or for anything else (an update, a log).
        if given.grad_fn is None and not (meant and isinstance(given, nn.Parameter) and _in_forward(caller)):
            return
        key = (caller.f_code.co_filename, caller.f_lineno)
        known = self._found.get(key)
        if known is None:
            behind = {id(leaf) for leaf in leaves(given)}
            known = Cut(source.place(*key), behind, meant, _in_forward(caller))
            self._found[key] = known
        self.last = known
        if isinstance(result, torch.Tensor) and not known.fed:
            result.__dict__[_MARK] = known

    def _forward(self, module: nn.Module, args: Any) -> None:
        for value in args:
            if isinstance(value, torch.Tensor) and _MARK in value.__dict__:
                value.__dict__[_MARK].fed = True
        if module.training and not torch.is_grad_enabled() and module._parameters:
            trained = [p for p in module._parameters.values() if p is not None and p.requires_grad]
            if trained and id(trained[0]) not in self.without_grad:
                place = switched_off()
                if place is not None:
                    self.without_grad.update({id(parameter): place for parameter in trained})


def _in_forward(frame: FrameType | None) -> bool:
    """Whether a layer's forward is running."""
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def switched_off() -> Place | None:
    """The line of the program that switched gradients off for what runs now."""
    for frame in places.frames():
        if (place := flow.switch_around(frame.f_code.co_filename, frame.f_lineno)) is not None:
            return place
    return None
