"""Remembers which of the user's lines put a tensor or module in its place: into a module, into an optimizer's state.

Told of registrations and loads only, never of an operation. Holds nothing alive and changes nothing.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy

from trimtab.virtual import origin
from trimtab.virtual.origin import Handle


class Placement(NamedTuple):
    """A tensor or module was put into a module."""

    line: Handle | None
    when: int
    name: str
    beside: torch.device | None
    """Where the module's other parameters were at that moment: those on a GPU count first."""
    replaced: bool
    """Whether something was there under this name before."""


_placed: weakref.WeakKeyDictionary[nn.Module, dict[str, Placement]] = weakref.WeakKeyDictionary()
"""By the module that took it."""
_loads: weakref.WeakKeyDictionary[torch.optim.Optimizer, Handle] = weakref.WeakKeyDictionary()


def placement(module: nn.Module, name: str) -> Placement | None:
    """Who last put something into a module under a name."""
    return _placed.get(module, {}).get(name)


def any_module() -> bool:
    """Whether there is any module that holds something."""
    return bool(_placed)


def loaded(optimizer: torch.optim.Optimizer) -> Handle | None:
    """The user's line that last loaded an optimizer's state."""
    return _loads.get(optimizer)


def _note(module: nn.Module, name: str, value: Any) -> None:
    if value is None or type(module).__hash__ is None:
        return
    kept = (module.__dict__.get(table, {}).get(name) for table in ("_parameters", "_buffers"))
    before = next((tensor for tensor in kept if tensor is not None), None)
    known = [p for p in (before, *itertools.islice(_held(module), 32)) if p is not None and not is_lazy(p)]
    first = next((p for p in known if p.device.type != "cpu"), known[0] if known else None)
    home = first.device if first is not None else None
    made = Placement(origin.here(1), origin.now(), name, home, before is not None)
    _placed.setdefault(module, {})[name] = made


def _held(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """A module's parameters as torch keeps them: the user's class may have a `parameters` of its own, which does not
    count on being asked while the module is being made."""
    seen: set[int] = set()
    left = [module]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield from one.__dict__.get("_parameters", {}).values()
        left += [child for child in reversed(one.__dict__.get("_modules", {}).values()) if child is not None]


def listen() -> Callable[[], None]:
    """Start to remember; answers with what ends it."""
    handles = [
        hooks.register_module_parameter_registration_hook(_note),
        hooks.register_module_buffer_registration_hook(_note),
        hooks.register_module_module_registration_hook(_note),
    ]
    real = torch.optim.Optimizer.load_state_dict

    @functools.wraps(real)
    def load_state_dict(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        line = origin.here()
        result = real(self, *args, **kwargs)
        if line is not None:
            _loads[self] = line
            for value in [value for slots in self.state.values() for value in slots.values()]:
                if isinstance(value, torch.Tensor):
                    trace = origin.trace_of(value)
                    born = trace.born if trace is not None else None
                    value.__dict__[origin.ATTRIBUTE] = origin.Trace(born, line)
        return result

    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]

    def end() -> None:
        for handle in handles:
            handle.remove()
        torch.optim.Optimizer.load_state_dict = real  # type: ignore[method-assign]

    return end
