"""Layers behind the trained ones that no optimizer holds: a loss's own weights, a decoder, a head left out of a list.

Most of what is left out of an optimizer is meant: a backbone in front of what is trained, a model behind a prompt, a
network that only judges. So this speaks only of layers that are reached through trained ones, that the program itself
made, drew at random and never loaded, that are in training mode and get gradients in every step, that nobody clears or
changes by hand, and that are the smaller part of what is behind the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import holders, mends_graph, mends_layers, source
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks import base
from trimtab.rehearse.checks.cuts import leaves
from trimtab.virtual import origin

_STEPS = 3
"""Optimizer steps at which is looked, and at each of which the layers must have gradients."""


@dataclass
class _Seen:
    parameter: ref[torch.Tensor]
    values: torch.Tensor
    times: int = 1


@dataclass
class _Told:
    """What is to be reported if no later optimizer takes them."""

    stepped: Place | None
    names: list[str]
    cause: Place
    fix: str
    edits: list[Edit]


class LeftOut(base.BaseCheck):
    """Looks at what runs behind trained layers and at what has gradients, in the first steps."""

    def install(self) -> None:
        self._made = base.optimizers_made()
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._behind: WeakSet[nn.Module] = WeakSet()
        """Modules with parameters of their own whose inputs come from trained layers."""
        self._spared: WeakSet[nn.Module] = WeakSet()
        """Modules whose weights were loaded, or whose gradients the program clears by themselves."""
        self._seen: dict[int, _Seen] = {}
        self._times: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._steps = self._passes = self._looked_at = 0
        self._held = base.ever_held()
        self._told: _Told | None = None
        base.backward_hub().after.append(self._passed)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)
        base.around(torch.optim.Optimizer, "__init__", self._init)
        base.around(nn.Module, "load_state_dict", self._spare)
        base.around(nn.Module, "zero_grad", self._clear)

    def _passed(self) -> None:
        self._passes += 1

    def _init(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, *args, **kwargs)
        self._times[optimizer] = origin.now()

    def _spare(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._spared.update(module.modules())
        return real(module, *args, **kwargs)

    def _clear(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(id(p) in self._held for p in module.parameters()):
            self._spared.update(module.modules())
        return real(module, *args, **kwargs)

    def _forward(self, module: nn.Module, args: Any) -> None:
        # What was changed is seen by its values.
        if self._steps >= _STEPS or not torch.is_grad_enabled() or self.process.settings.shapes_only:
            return
        self._ran.add(module)
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        if not own or not module.training or module in self._behind or module in self._spared:
            return
        if len(self._held) == 0 or all(id(p) in self._held for p in own):
            return
        if any(id(leaf) in self._held for tensor in _tensors(args) for leaf in leaves(tensor)):
            self._behind.add(module)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Optimizers that step in turn use the gradients of one backward pass: that is one look.
        if self._passes == self._looked_at or self._told is not None:
            return
        self._looked_at = self._passes
        self._steps += 1
        if self._steps > _STEPS + 1:
            return
        for module in list(self._behind):
            for parameter in module._parameters.values():
                if parameter is None or parameter.grad is None or id(parameter) in self._held:
                    continue
                values = base.plain_values(parameter)
                seen = self._seen.get(id(parameter))
                if seen is not None:
                    seen.times = seen.times + 1 if base.same_values(seen.values, values) else -_STEPS
                elif values is not None:
                    self._seen[id(parameter)] = _Seen(ref(parameter), values.clone())
        lasting = {
            key for key, seen in self._seen.items() if seen.times >= 2 and seen.parameter() is not None
        }
        if lasting:
            self._judge(lasting)

    def _judge(self, lasting: set[int]) -> None:
        """Whether what is left out is meant to be trained, and by which optimizer."""
        left = []
        for top in self._tops():
            own = [
                (name, p) for name, p in top.named_parameters() if id(p) not in self._held and p.requires_grad
            ]
            named = [(name, p) for name, p in own if p.grad is not None and self._is_own(top, name)]
            if any(id(p) in lasting for _, p in named) and len(named) == len(own):
                left.append((top, named))
        if not left:
            return
        chosen, instead = self._meant_for([top for top, _ in left])
        # An input that is trained (an image, a prompt) does not count: a model behind it only judges.
        held = [
            p
            for module in self._ran
            for p in module._parameters.values()
            if p is not None and id(p) in self._held
        ]
        size = sum(p.numel() for _, named in left for _, p in named)
        if not instead and size >= sum(p.numel() for p in held):
            return
        made = self._made.get(chosen) if chosen is not None else None
        if made is None:
            return
        time = self._times.get(chosen, 0)
        late = next(
            (
                at
                for top, named in left
                for own, _ in named
                if (at := base.put_at(top, own, lambda p: p.when > time))
            ),
            None,
        )
        names, wanted = [], []
        for top, named in left:
            called = next((found for f in places.frames() if (found := holders.expression_for(top, f))), "")
            names += [f"{called}.{own}".lstrip(".") for own, _ in named]
            wanted += list(dict.fromkeys(self._expression(called, top, own) for own, _ in named))
        if late is not None:
            behind = mends_layers.late_deed(made, late)
            edits = mends_graph.move_behind(made.file, made, behind)
            fix = f"Make the optimizer after line {behind.line} ({behind.code}), which puts them in."
            mend = made, fix, edits
        else:
            mend = mends_layers.given_too(made, type(chosen).__name__, wanted, instead)
        self._told = _Told(places.here(), names, *mend)

    def _expression(self, called: str, top: nn.Module, name: str) -> str:
        """The module to give to an optimizer for a parameter: the whole top, or its part where the rest is trained."""
        first = name.split(".")[0]
        if "." not in name or not any(id(p) in self._held for p in top.parameters()):
            return called
        return f"{called}.{first}" if first.isidentifier() else f"{called}[{first}]"

    def _tops(self) -> list[nn.Module]:
        ran = list(self._ran)
        inner = {id(child) for module in ran for child in module.modules() if child is not module}
        # What a module holds in a plain list is another fault (`untrained`).
        for value in (value for module in ran for value in vars(module).values()):
            kept = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else ()
            )
            inner |= {id(child) for one in kept if isinstance(one, nn.Module) for child in one.modules()}
        return [module for module in ran if id(module) not in inner]

    def _is_own(self, top: nn.Module, name: str) -> bool:
        """Whether the program itself made the layer of a parameter, and nothing was loaded into it."""
        module: Any = top
        for part in (*name.split(".")[:-1], ""):
            named = holders.source_of(module)
            if named is not None and hasattr(module, "from_pretrained"):
                return False  # a library's model: its weights may have come from a file
            if module in self._spared or not module.training or (named and not source.is_user_file(named[0])):
                return False
            module = getattr(module, part) if part else module
        return True

    def _meant_for(self, tops: list[nn.Module]) -> tuple[Any, bool]:
        """The optimizer that lacks them, and whether it holds what another one holds already."""
        made = list(self._made)
        sets = [{id(p) for p in base.trained_by(optimizer)} for optimizer in made]
        doubled = [
            optimizer
            for n, (optimizer, held) in enumerate(zip(made, sets, strict=True))
            if any(held == other for other in sets[:n])
        ]
        if len(doubled) == 1:
            return doubled[0], True
        inside = {id(p) for top in tops for p in top.parameters()}
        known = [optimizer for optimizer, held in zip(made, sets, strict=True) if held & inside]
        if len(known) == 1 or len(made) == 1:
            return (known or made)[0], False
        return None, False

    def finish(self) -> None:
        if self._told is None or any(key in self._held for key in self._seen):
            return
        self.report(
            "no-gradient",
            "Layers get gradients in every step and are in no optimizer, so they stay as they were drawn at random: "
            f"{base.shown(self._told.names)}.",
            self._told.stepped,
            cause_at(self._told.cause, "their parameters are not given to the optimizer"),
            fix=self._told.fix,
            op="optimizer.step",
            edits=self._told.edits,
        )


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)
