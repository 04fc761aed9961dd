"""Which layer of a program's models is on which device, as they stand when a model is first called. It only looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

from torch import nn

from trimtab.rehearse.checks.base import BaseCheck

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Layers(BaseCheck):
    """Notes the layers of each model that is called; what belongs to a model is no model of its own."""

    def install(self) -> None:
        self._known: WeakSet[nn.Module] = WeakSet()
        self._models: list[tuple[ref[nn.Module], str, dict[str, list[str]]]] = []
        nn.modules.module.register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, _: Any) -> None:
        if type(module).__hash__ is None or module in self._known:
            return
        inside = [one for one in module.modules() if type(one).__hash__ is not None]
        self._known.update(inside)
        found = placement_of(module)
        if found:
            # A part that was called by itself before the whole is told with the whole.
            parts = set(map(id, inside))
            self._models = [one for one in self._models if id(one[0]()) not in parts]
            self._models.append((ref(module), type(module).__name__, found))

    def finish(self) -> None:
        told: dict[str, list[str]] = {}
        several = len(self._models) > 1
        for _, name, found in self._models:
            for layer, devices in found.items():
                whole = ".".join(filter(None, [name, layer])) if several else layer
                told[whole] = [*dict.fromkeys([*told.get(whole, []), *devices])]
        if told:
            self.process.recorder.write(t="placement", layers=told)


def placement_of(model: nn.Module) -> dict[str, list[str]]:
    """The devices of each layer of a model, by its name; what merely wraps a model has no name of its own."""
    while len(inner := [m for m in model.children() if _holds(m)]) == 1 and not _own(model):
        model = inner[0]
    if inner:
        return dict(_layers(model))
    return {"": _devices(model)} if _holds(model) else {}


def _layers(model: nn.Module, name: str = "") -> Iterator[tuple[str, list[str]]]:
    """The parts that a reader tells apart: numbered layers as a whole, and what stands beside them."""
    for called, part in model.named_children():
        whole = f"{name}.{called}".lstrip(".")
        if not _holds(part):
            continue
        if not called.isdigit() and any(isinstance(m, _CONTAINERS) and len(m) > 1 for m in part.modules()):
            yield from _layers(part, whole)
        else:
            yield whole, _devices(part)
    if own := _own(model):
        yield name or "(its own)", sorted({str(tensor.device) for tensor in own})


def _own(module: nn.Module) -> list[Any]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _devices(module: nn.Module) -> list[str]:
    return sorted({str(t.device) for tensors in (module.parameters(), module.buffers()) for t in tensors})
