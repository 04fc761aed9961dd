"""Which line last made a parameter trainable or froze it. Only remembers; whether that is a fault is for the checks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch

from trimtab.diagnose.finding import Place
from trimtab.rehearse import places
from trimtab.virtual import functions


@dataclass(frozen=True)
class Deed:
    """A change of `requires_grad`."""

    held: ref[torch.Tensor]
    trainable: bool
    place: Place | None
    time: int


class Freezes:
    """The last change of every parameter, however it was written: the attribute, the method, a library's call."""

    def __init__(self) -> None:
        self._last: dict[int, Deed] = {}
        self._clock = itertools.count()
        self._latest = -1
        for function in (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__):  # type: ignore[attr-defined]
            functions.HANDLERS[function] = self._watched(functions.HANDLERS.get(function, functions.call))

    def now(self) -> int:
        """A moment to compare deeds with."""
        return next(self._clock)

    def of(self, tensor: torch.Tensor) -> Deed | None:
        """The last deed on a tensor."""
        deed = self._last.get(id(tensor))
        return deed if deed is not None and deed.held() is tensor else None

    def since(self, time: int) -> bool:
        """Whether anything was frozen or unfrozen after a moment."""
        return self._latest > time

    def _watched(self, real: functions.Handler) -> functions.Handler:
        def switch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensor = args[0] if args else None
            known = isinstance(tensor, torch.nn.Parameter)
            before = tensor.requires_grad if known and isinstance(tensor, torch.Tensor) else None
            result = real(func, args, kwargs)
            if known and isinstance(tensor, torch.Tensor) and tensor.requires_grad is not before:
                self._latest = self.now()
                self._last[id(tensor)] = Deed(ref(tensor), tensor.requires_grad, places.here(), self._latest)
            return result

        return switch


@cache
def freezes() -> Freezes:
    """The one memory of this process. To be called when a check is put in."""
    return Freezes()
