"""An optimizer that was made too early: what it holds was frozen since, or what is trained was unfrozen since.

Nothing raises: the steps change nothing, or leave out the layers that the program means to train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import mends_graph
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, optimizers_made, shown, trained_by
from trimtab.rehearse.checks.freezes import Deed, freezes


class StaleOptimizer(BaseCheck):
    """Compares when parameters were frozen or unfrozen with when the optimizers were made."""

    def install(self) -> None:
        self._freezes = freezes()
        self._made = optimizers_made()
        self._times: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._late: dict[int, tuple[str, Deed, Any]] = {}
        """Parameters by id, unfrozen after an optimizer was made, that had a gradient at a step without them."""
        around(torch.optim.Optimizer, "__init__", self._init)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)

    def _init(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, *args, **kwargs)
        self._times[optimizer] = self._freezes.now()

    def _forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._ran.add(module)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        made = self._times.get(optimizer)
        if made is None or not self._freezes.since(made):
            return
        held = trained_by(optimizer)
        if held and not any(p.requires_grad or p.grad is not None for p in held):
            self._all_frozen(optimizer, held, made)
            return
        stepped = {id(p) for known in self._times for p in trained_by(known)}
        mine = {id(p) for p in held}
        for name, parameter, whole in self._parameters():
            deed = self._freezes.of(parameter)
            if deed is None or not deed.trainable or deed.time < made or parameter.grad is None:
                continue
            if id(parameter) not in stepped and any(id(p) in mine for p in whole.parameters()):
                self._late.setdefault(id(parameter), (name, deed, optimizer))

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
        """The parameters of the modules that ran, each with its full name and the outermost module that holds it."""
        ran = list(self._ran)
        inner = {id(child) for module in ran for child in module.modules() if child is not module}
        for module in ran:
            if id(module) not in inner:
                yield from ((name, parameter, module) for name, parameter in module.named_parameters())

    def _all_frozen(self, optimizer: torch.optim.Optimizer, held: list[torch.Tensor], made: int) -> None:
        stepped = {id(p) for known in self._times for p in trained_by(known)}
        trained = [
            name
            for name, parameter, _ in self._parameters()
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in stepped
        ]
        deeds = [
            deed for p in held if (deed := self._freezes.of(p)) and deed.time > made and not deed.trainable
        ]
        if not trained or not deeds:
            return
        last = max(deeds, key=lambda deed: deed.time)
        self.process.explained |= {id(p) for p in held}
        self._report(
            f"Every parameter of the optimizer was frozen after it was made, and those that get gradients are in no "
            f"optimizer: {shown(trained)}. Its steps change nothing.",
            self._made.get(optimizer),
            last.place,
            "what this optimizer holds is frozen",
        )

    def finish(self) -> None:
        stepped = {id(p) for known in self._times for p in trained_by(known)}
        late = [entry for number, entry in self._late.items() if number not in stepped]
        if not late:
            return
        _, deed, optimizer = late[0]
        self._report(
            "Layers that were made trainable after the optimizer was made get gradients and are never stepped: "
            f"{shown([name for name, _, _ in late])}.",
            self._made.get(optimizer),
            deed.place,
            "this optimizer does not hold what is made trainable",
            added=True,
        )

    def _report(
        self, message: str, made: Place | None, deed: Place | None, why: str, added: bool = False
    ) -> None:
        where = f" at line {deed.line}" if deed is not None else ""
        fix = f"Make the optimizer after that (line {deed.line}: {deed.code})" if deed is not None else ""
        fix = fix or "Make the optimizer when it is settled what is trained"
        if added:
            fix += ", or tell it then: optimizer.add_param_group({'params': ...})"
        edits = (
            mends_graph.move_behind(made.file, made, deed) if made is not None and deed is not None else []
        )
        self.report(
            "no-gradient",
            message,
            places.here() or made,
            cause_at(made, f"{why} later{where}"),
            fix=f"{fix}.",
            op="optimizer.step",
            once=message,
            edits=edits,
        )
