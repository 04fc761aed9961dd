"""Layers that take part in the loss but are never stepped: kept in a plain list, or put in after the optimizer.

Leaving trained layers out of the optimizer on purpose is common; it is a fault only when the model's own tree does
not know the layer, or when the optimizer still holds the layer that it replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, optimizers_made, place_born, shown, trained_by

_STEPS = 2
"""Optimizer steps at which is looked."""


class Untrained(BaseCheck):
    """Compares what has a gradient with what the optimizers hold."""

    def install(self) -> None:
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._steps = 0
        self._made = optimizers_made()
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if self._steps < _STEPS and torch.is_grad_enabled():
            self._ran.add(module)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self._steps += 1
        if self._steps > _STEPS:
            return
        held = {id(p): p for o in self._optimizers for p in trained_by(o)}
        missing = {
            id(parameter): module
            for module in self._ran
            for parameter in module._parameters.values()
            if parameter is not None and parameter.grad is not None and id(parameter) not in held
        }
        if not missing:
            return
        known = {
            id(child)
            for module in self._ran
            if any(id(p) in held for p in module.parameters())
            for child in module.modules()
        }
        for path, module, owner in self._hidden(known):
            if any(id(parameter) in missing for parameter in module.parameters()):
                self._report_hidden(path, module, owner)
        used = {id(p) for module in self._ran for p in module._parameters.values() if p is not None}
        replaced = [p for key, p in held.items() if key not in used and p.grad is None and p.requires_grad]
        for parameter in replaced:
            twin = next(
                (
                    (name, other)
                    for module in self._ran
                    if id(module) in known
                    for name, other in module.named_parameters()
                    if id(other) in missing and other.dim() == parameter.dim()
                ),
                None,
            )
            if twin is not None:
                self.process.explained |= {id(known) for known in replaced}
                self._report_replaced(twin[0], place_born(twin[1]), self._made.get(optimizer))
                return

    def _hidden(self, known: set[int]) -> Iterator[tuple[str, nn.Module, str]]:
        """Modules in plain lists and dicts of modules that the optimizers know."""
        for module in list(self._ran):
            if id(module) not in known:
                continue
            for name, value in vars(module).items():
                if name.startswith("_"):
                    continue
                kept = value if isinstance(value, dict) else dict(enumerate(value)) if _is_list(value) else {}
                for key, item in kept.items():
                    if isinstance(item, nn.Module) and id(item) not in known:
                        yield f"{name}[{key!r}]", item, type(module).__name__

    def _report_hidden(self, path: str, module: nn.Module, owner: str) -> None:
        name = path.partition("[")[0]
        parameter = next(module.parameters(), None)
        place = place_born(parameter) if parameter is not None else None
        self.report(
            "no-gradient",
            f"{owner}.{name} holds layers in a plain list or dict: they are in no optimizer, are not moved by .to() "
            "and not saved, so they are never trained.",
            place or places.here(),
            cause_at(place, "a plain list or dict does not register the layers in it"),
            fix=f"Use nn.ModuleList (or nn.ModuleDict): self.{name} = nn.ModuleList([...]).",
            op="optimizer.step",
            module=f"{owner}.{name}",
            once=name,
        )

    def _report_replaced(self, name: str, born: Place | None, made: Place | None) -> None:
        self.report(
            "no-gradient",
            f"{shown([name])} receives gradients but is in no optimizer, while the optimizer holds parameters that the "
            "model no longer uses: it was made before the layer was replaced.",
            made or places.here(),
            cause_at(born, "this layer came into the model after the optimizer was made"),
            fix="Build or replace all layers first, then make the optimizer from model.parameters().",
            op="optimizer.step",
            module=name.rpartition(".")[0],
            once=name,
        )


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and not isinstance(value, str)
