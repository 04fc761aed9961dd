"""Which modules own a tensor or a module, registered or not, and where it stands in the outermost of them.

Looks at live modules; changes nothing, computes nothing on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import holders
from trimtab.virtual.state import machine


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module that holds a tensor (or a module that owns it)."""

    module: nn.Module
    name: str
    registered: bool
    """Whether `module.to()` reaches it: a parameter, a buffer or a submodule."""
    container: str = ""
    """The plain Python container in between ("list", "dict"), if any."""


def modules_seen(frame: FrameType | None) -> list[nn.Module]:
    """The modules that the machine in force knows, and those in the variables of the user's frames."""
    found: dict[int, nn.Module] = {}
    current = machine()
    for module in list(current.modules) if current is not None else ():
        found[id(module)] = module
    while frame is not None:
        for value in list(frame.f_locals.values()):
            kept = vars(value).values() if holders.is_own(value) else ()
            found |= {id(one): one for one in (value, *kept) if isinstance(one, nn.Module)}
        frame = frame.f_back
    for module in list(found.values()):
        for child in module.modules():
            found.setdefault(id(child), child)
    return list(found.values())


def attributes_of(tensor: torch.Tensor, modules: Iterable[nn.Module]) -> list[Attribute]:
    """Every module attribute that holds a tensor, registered ones first."""
    return _holding(lambda value: isinstance(value, torch.Tensor) and holders.same(value, tensor), modules)


def holders_of(module: nn.Module, modules: Iterable[nn.Module]) -> list[Attribute]:
    """The module attributes that hold a module, registered ones first."""
    return _holding(lambda value: value is module, modules)


def _holding(wanted: Callable[[Any], bool], modules: Iterable[nn.Module]) -> list[Attribute]:
    found = []
    for owner in modules:
        for name in holders.TABLES:
            held = getattr(owner, name).items()
            found += [Attribute(owner, key, registered=True) for key, value in held if wanted(value)]
        found += [Attribute(owner, name, False, kind) for name, kind, _ in holders.plainly(owner, wanted)]
    return sorted(found, key=lambda attribute: not attribute.registered)


def path_of(module: nn.Module, modules: Iterable[nn.Module]) -> str:
    """The module's name from the outermost module that registers it: `layers.3.self_attn`."""
    return ".".join(reversed([holder.name for holder in climb(module, modules)]))


def outermost(module: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """The outermost module of which a module is a registered part."""
    above = climb(module, modules)
    return above[-1].module if above else module


def climb(module: nn.Module, modules: Iterable[nn.Module]) -> list[Attribute]:
    """Who registers a module, who registers that one, and so on outwards."""
    known, found = list(modules), []
    for _ in range(32):
        holder = next((h for h in holders_of(module, known) if h.registered), None)
        if holder is None:
            break
        found.append(holder)
        module = holder.module
    return found
