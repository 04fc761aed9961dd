"""TorchScript on virtual GPUs: scripted modules that are moved, saved and loaded.

A scripted module keeps its tensors in C++, where a tensor object cannot become a virtual one: they are replaced. What
TorchScript compiles runs operation by operation, through the dispatcher. Never fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from trimtab.virtual.processes import virtual_device
from trimtab.virtual.state import Machine, NotSimulated, Patch
from trimtab.virtual.tensor import VIRTUAL


def apply(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Module._apply for a scripted module: its tensors are replaced by changed ones."""
    for child in module.children():
        child._apply(change)
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            with torch.no_grad():
                changed = change(parameter)
            module._c.setattr(name, nn.Parameter(changed, parameter.requires_grad))
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            module._c.setattr(name, change(buffer))


def is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.RecursiveScriptModule)


def _load(native: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(native)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or virtual_device(map_location) is None:
            return native(f, map_location, *args, **kwargs)
        return native(f, "cpu", *args, **kwargs).to(map_location)

    return load


def _save(native: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(native)
    def save(m: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (*m.parameters(), *m.buffers()) if isinstance(m, nn.Module) else ()
        if any(tensor.__class__ in VIRTUAL for tensor in tensors):
            raise NotSimulated(
                "Saving a scripted module from a GPU is not simulated by virtual GPUs: save it from the CPU."
            )
        return native(m, *args, **kwargs)

    return save


def patches(machine: Machine) -> list[Patch]:
    """What has to be replaced while a machine is in force."""
    return [
        (torch.jit, "load", _load(torch.jit.load)),
        (torch.jit, "save", _save(torch.jit.save)),
        (torch.jit.RecursiveScriptModule, "save", _save(torch.jit.RecursiveScriptModule.save)),
    ]
