"""Layers and tensors that take part in the loss, get gradients and are never stepped, though the program means to.

Leaving layers out of the optimizer on purpose is common. It is a fault when the model's own tree does not know them (a
plain list, a parameter that was moved or scaled after it became one), when the optimizer still holds the layer that one
replaced, or when layers behind the trained ones stay as they were drawn at random (see `left_out`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import holders, mends_graph, mends_layers, source
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import (
    BaseCheck,
    ever_held,
    optimizers_made,
    place_born,
    plain_values,
    put_at,
    same_values,
    shown,
    trained_by,
)
from trimtab.rehearse.checks.cuts import leaves

_STEPS = 3
"""Optimizer steps at which is looked."""
_AGAIN = 4
"""How often it looks anew because a layer or parameter was replaced under training."""
_OWN_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass
class _Stray:
    """A tensor of a module that no module has registered, at two steps or more."""

    tensor: ref[torch.Tensor]
    leaves: list[ref[torch.Tensor]]
    owner: nn.Module
    name: str
    values: torch.Tensor
    again: bool = False


class Untrained(BaseCheck):
    """Compares what has a gradient with what the optimizers hold."""

    def install(self) -> None:
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._strays: dict[tuple[int, str, int], _Stray] = {}
        self._steps = 0
        self._stale = False
        self._made = optimizers_made()
        self._ever_held = ever_held()
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)
        self._replaced_by: list[Place] = []
        """The lines, innermost first, that last replaced something in a module after training began."""
        self._again = 0
        nn.modules.module.register_module_parameter_registration_hook(self._registered)
        nn.modules.module.register_module_module_registration_hook(self._registered)

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        """What is replaced between steps is looked at anew, and what ran before it counts no more."""
        before = module._parameters.get(name)
        known = module._modules.get(name) if before is None else before
        training = self._steps or self._stale
        if training and known is not None and value is not known and module in self._ran:
            self._replaced_by = [source.place(f.f_code.co_filename, f.f_lineno) for f in places.frames()]
            if self._again < _AGAIN and not self._stale:
                self._again += 1
                self._steps = 0
                self._stale = True

    def _forward(self, module: nn.Module, args: Any) -> None:
        if self._steps < _STEPS and torch.is_grad_enabled():
            if self._stale:
                self._ran, self._stale = WeakSet(), False
            self._ran.add(module)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self._steps += 1
        if self._steps > _STEPS:
            return
        held = {id(p): p for o in self._optimizers for p in trained_by(o)}
        self._look_for_strays(held)
        made = {id(p) for o in list(self._made) for p in trained_by(o)} | held.keys()
        missing = {
            id(parameter): module
            for module in self._ran
            for parameter in module._parameters.values()
            if parameter is not None and parameter.grad is not None and id(parameter) not in made
        }
        if not missing:
            return
        known = {
            id(child)
            for module in self._ran
            if any(id(p) in held for p in module.parameters())
            for child in module.modules()
        }
        for name, modules, owner in self._hidden(known):
            if any(id(parameter) in missing for module in modules for parameter in module.parameters()):
                self._report_hidden(name, owner, modules)
        used = {id(p) for module in self._ran for p in module._parameters.values() if p is not None}
        replaced = [p for key, p in held.items() if key not in used and p.requires_grad and _is_idle(p)]
        for parameter in replaced:
            twin = next(
                (
                    (name, other, module)
                    for module in self._ran
                    if id(module) in known
                    for name, other in module.named_parameters()
                    if id(other) in missing and other.dim() == parameter.dim()
                ),
                None,
            )
            if twin is not None:
                self.process.explained |= {id(known) for known in replaced}
                self._report_replaced(*twin, self._made.get(optimizer))
                return

    def _look_for_strays(self, held: dict[int, torch.Tensor]) -> None:
        """Tensors that modules keep without having registered them, and that get gradients."""
        ran = list(self._ran)
        registered = {id(p) for module in ran for p in module._parameters.values() if p is not None}
        for module in ran:
            for name, value in vars(module).items():
                for tensor in _entries(value) if name not in _OWN_TABLES else ():
                    if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                        continue
                    key = (id(module), name, id(tensor))
                    if (seen := self._strays.get(key)) is not None and seen.tensor() is tensor:
                        seen.again = same_values(seen.values, plain_values(tensor))
                        continue
                    behind = list(leaves(tensor, 200))
                    if any(id(leaf) in held or id(leaf) in registered for leaf in behind):
                        continue  # computed from what is trained: kept from the last pass
                    values = plain_values(tensor)
                    if values is not None and behind and all(leaf.grad is not None for leaf in behind):
                        refs = [ref(leaf) for leaf in behind]
                        self._strays[key] = _Stray(ref(tensor), refs, module, name, values.clone())

    def finish(self) -> None:
        held = self._ever_held
        told: set[tuple[int, str]] = set()
        for stray in self._strays.values():
            tensor = stray.tensor()
            stepped = any(id(leaf) in held for one in stray.leaves if (leaf := one()) is not None)
            if (
                tensor is not None
                and stray.again
                and not stepped
                and (id(stray.owner), stray.name) not in told
            ):
                told.add((id(stray.owner), stray.name))
                self._report_stray(stray, tensor)
        self._strays.clear()

    def _hidden(self, known: set[int]) -> Iterator[tuple[str, list[nn.Module], nn.Module]]:
        """Plain lists and dicts, in modules that the optimizers know, of modules that they do not."""
        for module in list(self._ran):
            for name, value in vars(module).items() if id(module) in known else ():
                kept = [item for item in _entries(value) if isinstance(item, nn.Module)]
                unknown = [item for item in kept if item is not value and id(item) not in known]
                if unknown and not name.startswith("_"):
                    yield name, unknown, module

    def _report_hidden(self, name: str, owner: nn.Module, modules: list[nn.Module]) -> None:
        parameter = next((p for module in modules for p in module.parameters()), None)
        place = place_born(parameter) if parameter is not None else None
        kind = "ModuleDict" if isinstance(vars(owner)[name], dict) else "ModuleList"
        fix, edits = f"Use nn.{kind}: self.{name} = nn.{kind}(...).", list[Edit]()
        if (found := _set_at(owner, name)) is not None:
            place, value = found
            fix, edits = mends_layers.registered(place.file, name, value, kind)
        said = (
            "holds layers in a plain list or dict: they are in no optimizer, are not moved by .to() and not saved, so "
            "they are never trained."
        )
        why = "a plain list or dict does not register the layers in it"
        self._unregistered(owner, name, said, place, why, (fix, edits), once=name)

    def _report_stray(self, stray: _Stray, tensor: torch.Tensor) -> None:
        value = vars(stray.owner).get(stray.name)
        found = _set_at(stray.owner, stray.name)
        place = found[0] if found is not None else place_born(tensor)
        why = "this is a plain tensor, not a parameter of the module"
        mend: mends_layers.Mend | None = None
        if isinstance(value, dict | list | tuple):
            why = "a plain list or dict does not register the parameters in it"
            kind = "ParameterDict" if isinstance(value, dict) else "ParameterList"
            mend = mends_layers.registered(*_two(found, stray.name), kind) if found is not None else None
        elif found is not None:
            mend = mends_layers.made_parameter(*_two(found, stray.name))
            if not tensor.is_leaf:
                why = "what is done to the parameter here gives back a plain tensor, which the module does not register"
        otherwise = f"Register it: self.{stray.name} = nn.Parameter(...), as the last thing done to it."
        said = (
            "gets gradients but is in no optimizer, is not moved by .to() and not saved: it is never trained."
        )
        self._unregistered(stray.owner, stray.name, said, place, why, mend or (otherwise, []))

    def _unregistered(
        self,
        owner: nn.Module,
        name: str,
        said: str,
        place: Place | None,
        why: str,
        mend: mends_layers.Mend,
        once: str = "",
    ) -> None:
        """Something that a module holds and has not registered."""
        module, where = f"{type(owner).__name__}.{name}", place or places.here()
        fix, edits = mend
        self.report(
            *("no-gradient", f"{module} {said}", where, cause_at(place, why), fix, "optimizer.step"),
            module=module,
            once=once,
            edits=edits,
        )

    def _report_replaced(
        self, name: str, parameter: torch.Tensor, top: nn.Module, made: Place | None
    ) -> None:
        deed = put_at(top, name, lambda put: put.replaced) or place_born(parameter)
        behind = mends_layers.late_deed(made, deed) if made is not None and deed is not None else deed
        after = f" (line {behind.line}: {behind.code})" if behind is not None else ""
        fix, edits = f"Make the optimizer after all layers are in their place{after}.", list[Edit]()
        if made is not None and self._replaced_by:
            behind = deed or self._replaced_by[0]
            fix, edits = mends_layers.made_again(made, self._replaced_by) or (fix, [])
        elif made is not None and behind is not None:
            edits = mends_graph.move_behind(made.file, made, behind)
        self.report(
            "no-gradient",
            f"{shown([name])} receives gradients but is in no optimizer, while the optimizer holds parameters that the "
            "model no longer uses: it was made before the layer was replaced.",
            made or places.here(),
            cause_at(behind, "this puts layers into the model after the optimizer took its parameters"),
            fix=fix,
            op="optimizer.step",
            module=name.rpartition(".")[0],
            once=name,
            edits=edits,
        )


def _is_idle(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no gradient, or one that was set to 0 and never added to."""
    values = plain_values(parameter.grad)
    return parameter.grad is None or (values is not None and not bool(values.any()))


def _two(found: tuple[Place, Any], name: str) -> tuple[str, str, Any]:
    return found[0].file, name, found[1]


def _entries(value: object) -> list[object]:
    """What an attribute holds: itself, or what is in it."""
    if isinstance(value, dict):
        return list(value.values())[:256]
    return list(value[:256]) if isinstance(value, list | tuple) else [value]


def _set_at(owner: nn.Module, name: str) -> tuple[Place, Any] | None:
    """Where a module's class sets an attribute, and what to, if that does not hang on a condition."""
    named = holders.source_of(owner)
    if named is None or not source.is_user_file(named[0]):
        return None
    found = mends_layers.attribute_set(*named, name)
    return found if found is not None and not isinstance(found[1], ast.IfExp) else None
