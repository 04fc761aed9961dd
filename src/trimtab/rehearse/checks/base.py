"""What the checks share: a base class, and the places at which a training loop can be watched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trimtab.diagnose import source
from trimtab.diagnose.finding import Cause, Edit, Finding, Place, Severity
from trimtab.rehearse import places, shield
from trimtab.rehearse.shield import around
from trimtab.virtual import deeds, functions, origin, state
from trimtab.virtual.tensor import payload_of

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process


class BaseCheck:
    """Watches for one family of faults that raise nothing. This one does nothing yet."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._said: set[str] = set()

    def report(
        self,
        kind: str,
        message: str,
        where: Place | None,
        cause: Cause | None,
        fix: str,
        op: str,
        *,
        module: str = "",
        severity: Severity = "fault",
        once: str = "",
        edits: list[Edit] | None = None,
    ) -> None:
        """Record a finding; what is said under the same word of `once`, only the first time."""
        if kind == "non-finite" and self.process.made_up:
            return  # it may come from a value that nobody computed, which has been told
        if once not in self._said:
            self._said |= {once} - {""}
            finding = Finding(kind, severity, message, where, cause, fix, op, module, edits=edits or [])
            self.process.report(finding)

    def install(self) -> None:
        """Put its hooks in."""

    def finish(self) -> None:
        """Report what only the end of the run can tell."""

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """Add what this check knows of the cause of an error that the script raised."""
        return finding


def watch_function(function: Any, look: Callable[[FrameType, tuple[Any, ...], Any], None]) -> None:
    """Let a check look at every call of a torch function: the line that asked, the arguments, the result.

    By a handler of the function mode: a wrapper in torch's namespace would hide the function's identity.
    """
    known = functions.HANDLERS.get(function, functions.call)
    whose = shield.owner_of(look)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = known(func, args, kwargs)
        # One frame up is the function mode, two up the line that asked (or a method of the virtual tensor).
        shield.call(whose, look, sys._getframe(2), args, result)
        return result

    functions.HANDLERS[function] = handler


class Backward:
    """Tells listeners of every backward pass: before (with its roots and the user's line) and after."""

    def __init__(self) -> None:
        self.before: list[Callable[[list[torch.Tensor], Place | None], None]] = []
        self.after: list[Callable[[], None]] = []
        self._inside = False
        around(torch.autograd, "backward", self._call, whose="Backward")

    def _call(self, real: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A re-entrant checkpoint runs a backward inside the backward: only the outer one is the user's.
        if self._inside:
            return real(tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        place = places.here()
        self._inside = True
        try:
            for listener in self.before:
                shield.call(shield.owner_of(listener), listener, roots, place)
            result = real(tensors, *args, **kwargs)
            for listener_after in self.after:
                shield.call(shield.owner_of(listener_after), listener_after)
        finally:
            self._inside = False
        return result


@cache
def backward_hub() -> Backward:
    """The one place at which backward passes are watched in this process."""
    return Backward()


@cache
def optimizers_made() -> WeakKeyDictionary[Any, Place | None]:
    """The optimizers of this process, and the user's line that made each. To be called when a check is put in."""
    found: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()

    def init(real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, *args, **kwargs)
        found[optimizer] = places.here()

    around(torch.optim.Optimizer, "__init__", init, whose="the list of optimizers")
    return found


@cache
def ever_held() -> set[int]:
    """Ids of all parameters that any optimizer was ever given, also one that is gone. To be called as above."""
    found: set[int] = set()

    def add(real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(optimizer, *args, **kwargs)
        found.update(id(parameter) for parameter in trained_by(optimizer))
        return result

    around(torch.optim.Optimizer, "add_param_group", add, whose="the list of optimizers")
    return found


def trained_by(optimizer: Any) -> list[torch.Tensor]:
    """The parameters that an optimizer steps; none of an object that only looks like one."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def plain_values(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The values of a tensor; None of one that has none here, or has them in parts or in a form of its own."""
    values = payload_of(tensor.detach()) if tensor is not None and not tensor.is_sparse else None
    plain = values is not None and type(values) in (torch.Tensor, nn.Parameter) and not values.is_meta
    return values if plain and values is not None and values.numel() else None


def same_values(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are there and equal."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other)


def place_born(tensor: torch.Tensor) -> Place | None:
    """Where a tensor was made, in the user's code."""
    born = origin.born_of(tensor)
    return source.place(born.file, born.line) if born is not None else None


def put_at(top: nn.Module, name: str, wanted: Callable[[deeds.Placement], bool]) -> Place | None:
    """The line that put a part of the way from a module to one of its parameters into its place, in such a way."""
    module: Any = top
    for part in name.split("."):
        put = deeds.placement(module, part)
        line = origin.resolve(put.line) if put is not None and wanted(put) else None
        if line is not None:
            return source.place(line.file, line.line)
        module = getattr(module, part)
    return None


def world_size() -> int:
    """How many ranks there are, 1 without a process group."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def names_of(weights: list[torch.Tensor]) -> list[str]:
    """What the program's modules call these weights; by its shape, one that is in none."""
    here = state.machine()
    pairs = [
        pair for module in (here.modules if here is not None else ()) for pair in module.named_parameters()
    ]
    # The longest name, by the outermost module, is the one that is kept.
    known = {id(weight): name for name, weight in sorted(pairs, key=lambda pair: len(pair[0]))}
    return [known.get(id(weight), f"a weight of shape {tuple(weight.shape)}") for weight in weights]


def shown(names: list[str], most: int = 6) -> str:
    """A list of names that stays readable."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
