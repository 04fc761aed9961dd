"""The one place at which writes into tensors in place are watched: by a method, an operator, an item, or `.data`.

It tells listeners and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import torch

from trimtab.rehearse import shield
from trimtab.rehearse.checks.base import watch_function

Listener = Callable[[str, torch.Tensor, FrameType], None]
_NO_WRITERS = frozenset(("requires_grad_", "rename_", "share_memory_", "detach_"))
_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")


class Writes:
    """Tells who listens of every write: the method's name, the tensor, and the frame that asked."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        names = [n for n in dir(torch.Tensor) if n.endswith("_") and not n.startswith("_")]
        for name in (*_OPERATORS, *(n for n in names if n not in _NO_WRITERS)):
            self._watch(getattr(torch.Tensor, name), name)
        self._watch(torch.Tensor.data.__set__, "data")  # type: ignore[attr-defined]

    def _watch(self, function: Any, name: str) -> None:
        def wrote(frame: FrameType, args: tuple[Any, ...], result: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                for listener in self.listeners:
                    shield.call(shield.owner_of(listener), listener, name, args[0], frame)

        watch_function(function, wrote)


@cache
def writes() -> Writes:
    """The one watch of this process. To be called when a check is put in."""
    return Writes()
