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
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, ever_held, optimizers_made, shown, trained_by
from trimtab.rehearse.checks.cuts import leaves
from trimtab.virtual import deeds, origin
from trimtab.virtual.tensor import payload_of

_STEPS = 3
"""Optimizer steps at which is looked, and at each of which the layers must have gradients."""


@dataclass
class _Seen:
    parameter: ref[torch.Tensor]
    values: torch.Tensor
    times: int = 1


class LeftOut(BaseCheck):
    """Looks at what runs behind trained layers and at what has gradients, in the first steps."""

    def install(self) -> None:
        self._made = optimizers_made()
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._behind: WeakSet[nn.Module] = WeakSet()
        """Modules with parameters of their own whose inputs come from trained layers."""
        self._spared: WeakSet[nn.Module] = WeakSet()
        """Modules whose weights were loaded, or whose gradients the program clears by themselves."""
        self._seen: dict[int, _Seen] = {}
        self._times: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._steps = 0
        self._held = ever_held()
        self._told: tuple[Place | None, list[str], str, Place | None, mends_layers.Mend] | None = None
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)
        around(torch.optim.Optimizer, "__init__", self._init)
        around(nn.Module, "load_state_dict", self._spare)
        around(nn.Module, "zero_grad", self._clear)

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
        if self._steps >= _STEPS or not torch.is_grad_enabled():
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
        self._steps += 1
        if self._steps > _STEPS + 1 or self._told is not None:
            return
        for module in list(self._behind):
            for parameter in module._parameters.values():
                if parameter is None or parameter.grad is None or id(parameter) in self._held:
                    continue
                values = payload_of(parameter.detach())
                seen = self._seen.get(id(parameter))
                if seen is None:
                    self._seen[id(parameter)] = _Seen(ref(parameter), values.clone())
                else:
                    seen.times = seen.times + 1 if torch.equal(seen.values, values) else -_STEPS
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
        # An input that is trained (an image, a prompt) does not count: a model behind it only judges.
        held = [
            p
            for module in self._ran
            for p in module._parameters.values()
            if p is not None and id(p) in self._held
        ]
        size = sum(p.numel() for _, named in left for _, p in named)
        if not left or size >= sum(p.numel() for p in held):
            return
        top, named = left[0]
        chosen, instead = self._meant_for(top)
        if chosen is None:
            return
        paths = [name.rpartition(".")[0] for name, _ in named]
        parts = (
            list(dict.fromkeys(path.split(".")[0] for path in paths))
            if any(id(p) in self._held for p in top.parameters())
            else [""]
        )
        name = next((found for frame in places.frames() if (found := holders.expression_for(top, frame))), "")
        dotted = [f".{part}" if part.isidentifier() else f"[{part}]" if part else "" for part in parts]
        wanted = [f"{name}{part}" for part in dotted] if name else []
        made = self._made.get(chosen)
        late = next(
            (put for own, _ in named if (put := _put_after(top, own, self._times.get(chosen, 0)))), None
        )
        if late is not None and made is not None:
            behind = mends_layers.late_deed(made, late)
            edits = mends_graph.move_behind(made.file, made, behind)
            fix = f"Make the optimizer after line {behind.line} ({behind.code}), which puts them in."
            self._told = places.here(), [own for own, _ in named], type(top).__name__, made, (fix, edits)
            return
        mend: mends_layers.Mend = ("Give the optimizer their parameters too.", [])
        if made is not None and wanted:
            mend = mends_layers.given_too(made, type(chosen).__name__, wanted, instead)
        self._told = (
            places.here(),
            [f"{name}.{own}".lstrip(".") for own, _ in named],
            type(top).__name__,
            made,
            mend,
        )

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
            if module in self._spared or not module.training or (named and not source.is_user_file(named[0])):
                return False
            module = getattr(module, part) if part else module
        return True

    def _meant_for(self, top: nn.Module) -> tuple[Any, bool]:
        """The optimizer that lacks them, and whether it holds what another one holds already."""
        made = list(self._made)
        sets = [{id(p) for p in trained_by(optimizer)} for optimizer in made]
        doubled = [
            optimizer
            for n, (optimizer, held) in enumerate(zip(made, sets, strict=True))
            if any(held == other for other in sets[:n])
        ]
        if len(doubled) == 1:
            return doubled[0], True
        inside = {id(p) for p in top.parameters()}
        known = [optimizer for optimizer, held in zip(made, sets, strict=True) if held & inside]
        if len(known) == 1 or len(made) == 1:
            return (known or made)[0], False
        return None, False

    def finish(self) -> None:
        if self._told is None or any(key in self._held for key in self._seen):
            return
        stepped, names, kind, made, (fix, edits) = self._told
        self.report(
            "no-gradient",
            f"Layers of {kind} get gradients in every step and are in no optimizer, so they stay as they were drawn at "
            f"random: {shown(names)}.",
            stepped,
            cause_at(made, "this optimizer is not given their parameters"),
            fix=fix,
            op="optimizer.step",
            edits=edits,
        )


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)


def _put_after(top: nn.Module, name: str, time: int) -> Place | None:
    """The line that put a part of the way to a parameter into its place after a moment."""
    module: Any = top
    for part in name.split("."):
        put = deeds.placement(module, part)
        line = origin.resolve(put.line) if put is not None and put.when > time else None
        if line is not None:
            return source.place(line.file, line.line)
        module = getattr(module, part)
    return None
