"""Where the program is when it allocates: operation, module, line. Taken as code objects; read when somebody asks."""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.virtual import origin
from trimtab.virtual.origin import Handle

_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_CALLS = frozenset((nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__))
ModuleRef = weakref.ReferenceType[nn.Module]
_hidden: tuple[str, ...] = ()


def hide(*folders: str) -> None:
    """Lines in these folders are nobody's: those of who listens to the program."""
    global _hidden
    _hidden = folders


class Place(NamedTuple):
    """Where something was allocated."""

    op: str = ""
    module: ModuleRef | None = None
    where: Handle | None = None
    """The user's line."""
    inside: Handle | None = None
    """The library's line below it."""


class Route:
    """Which module ran when, by the numbers that autograd gives its nodes: a node's module is known in backward."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.modules: list[ModuleRef] = []

    def enter(self, module: nn.Module) -> None:
        """Nodes from now on belong to this module."""
        self.numbers.append(torch.autograd._get_sequence_nr())
        self.modules.append(weakref.ref(module))

    def clear(self) -> None:
        self.numbers.clear()
        self.modules.clear()

    def module(self, number: int) -> ModuleRef | None:
        """The module of the node with this number."""
        place = bisect_right(self.numbers, number) - 1
        return self.modules[place] if place >= 0 else None


ROUTE = Route()


def here() -> Place:
    """The operation that allocates, and what it runs in."""
    frame: FrameType | None = sys._getframe(1)
    op, module, inside = "", None, None
    user: Handle | None = None
    while frame is not None and (user is None or module is None):
        code = frame.f_code
        if code.co_filename.startswith(_OWN):
            if not op and code.co_name == "work":
                op = str(getattr(frame.f_locals.get("plan"), "name", ""))
        elif code in _CALLS:
            if module is None:
                module = weakref.ref(frame.f_locals["self"])
        elif code.co_name == "_engine_run_backward" and module is None:
            module = _module_of_node()
        elif user is not None:
            pass
        elif origin.is_user_file(code.co_filename):
            user = code, frame.f_lasti
        elif inside is None and not (
            origin.is_plumbing(code.co_filename) or code.co_filename.startswith(_hidden)
        ):
            inside = code, frame.f_lasti
        frame = frame.f_back
    return Place(op, module, user, inside)


def _module_of_node() -> ModuleRef | None:
    if torch._C._current_graph_task_id() == -1:
        return None
    node: Any = torch._C._current_autograd_node()
    return ROUTE.module(node._sequence_nr()) if node is not None else None  # a hook of the engine itself


def names(modules: Iterable[nn.Module]) -> dict[int, str]:
    """The names of modules in the models that they are part of, by id."""
    known = tuple(modules)
    parts = {id(part) for module in known for part in module.children()}
    found: dict[int, str] = {}
    for model in (module for module in known if id(module) not in parts):
        for name, module in model.named_modules():
            found[id(module)] = max(found.get(id(module), ""), name, key=len)
    return found


def name_of(place: Place, known: dict[int, str]) -> str:
    """The module by its name in the model; a model itself, and one of which nothing is known, by its class."""
    module = place.module() if place.module is not None else None
    if module is None:
        return ""
    return known.get(id(module)) or type(module).__name__
