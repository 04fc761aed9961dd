"""What the checks share: a base class, and the places at which a training loop can be watched."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse import places
from trimtab.virtual import origin

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process


class BaseCheck:
    """A check that does nothing yet."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def install(self) -> None:
        """Put its hooks in."""

    def finish(self) -> None:
        """Report what only the end of the run can tell."""

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """Add what this check knows."""
        return finding


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function by one made from it, keeping its name and signature."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(make(real)))


class Backward:
    """Tells listeners of every backward pass: before (with its roots and the user's line) and after."""

    def __init__(self) -> None:
        self.before: list[Callable[[list[torch.Tensor], Place | None], None]] = []
        self.after: list[Callable[[], None]] = []
        self._depth = 0
        around(torch.autograd, "backward", self._wrap)

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # A re-entrant checkpoint runs a backward inside the backward: only the outer one is the user's.
            if self._depth:
                return real(tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            place = places.here()
            self._depth += 1
            try:
                for told in self.before:
                    told(roots, place)
                result = real(tensors, *args, **kwargs)
                for told_after in self.after:
                    told_after()
            finally:
                self._depth -= 1
            return result

        return backward


_backward: Backward | None = None


def backward_hub() -> Backward:
    """The one place at which backward passes are watched in this process."""
    global _backward
    if _backward is None:
        _backward = Backward()
    return _backward


_made: WeakKeyDictionary[Any, Place | None] | None = None


def _remember_makers() -> WeakKeyDictionary[Any, Place | None]:
    found: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            real(optimizer, *args, **kwargs)
            found[optimizer] = places.here()

        return init

    around(torch.optim.Optimizer, "__init__", wrap)
    return found


def optimizers_made() -> WeakKeyDictionary[Any, Place | None]:
    """The optimizers of this process, and the user's line that made each. To be called when a check is put in."""
    global _made
    if _made is None:
        _made = _remember_makers()
    return _made


def place_born(tensor: torch.Tensor) -> Place | None:
    """Where a tensor was made, in the user's code."""
    born = origin.born_of(tensor)
    return places.place_of(born.file, born.line) if born is not None else None


def world_size() -> int:
    """How many ranks there are, 1 without a process group."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def shown(names: list[str], most: int = 6) -> str:
    """A list of names that stays readable."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def same_process(pid: int) -> bool:
    """Whether this is still the process in which something was noted (not a fork of it)."""
    return os.getpid() == pid
