"""DistributedDataParallel: calls that go past it, models that drift apart, and the causes of its own errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose.finding import Cause, Finding, Place
from trimtab.rehearse import agreement, places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, place_born, shown, world_size


@dataclass
class _Wrapped:
    held: ref[DistributedDataParallel]
    number: int
    inner: WeakSet[nn.Module]
    forwards: int = 0
    """Passes through DDP itself since the last optimizer step."""
    past_it: Place | None = None
    """Where the module inside was called directly, with gradients on, since the last step."""
    collectives: int = 0
    steps: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    """Steps for each set of parameters: of a sharded optimizer every rank steps others."""
    unsynced: Place | None = None
    """Where `no_sync()` was opened around a backward pass since the last step; forgotten when one is synchronised."""
    unused: dict[str, Place | None] = field(default_factory=dict)
    opaque: tuple[str, Place | None] | None = None


class Ddp(BaseCheck):
    """Follows every DDP wrapper of this process."""

    def install(self) -> None:
        self._wrapped: list[_Wrapped] = []
        self._inside = 0
        self._in_backward = False
        self._reentrant: Place | None = None
        self._opened: Place | None = None
        self._grad_switched: WeakKeyDictionary[nn.Module, tuple[bool, Place | None]] = WeakKeyDictionary()
        around(DistributedDataParallel, "__init__", self._made)
        around(DistributedDataParallel, "forward", self._forward)
        around(DistributedDataParallel, "no_sync", self._no_sync)
        around(nn.Module, "requires_grad_", self._requires_grad)
        around(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        nn.modules.module.register_module_forward_pre_hook(self._module_called)
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(self._stepped)

    def _made(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def init(ddp: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            real(ddp, module, *args, **kwargs)
            entry = _Wrapped(ref(ddp), len(self._wrapped), WeakSet(module.modules()))
            entry.collectives = agreement.made()
            self._wrapped.append(entry)

        return init

    def _forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                output = real(ddp, *args, **kwargs)
            finally:
                self._inside -= 1
            entry = self._entry(ddp)
            if entry is not None and torch.is_grad_enabled():
                entry.forwards += 1
                if entry.opaque is None and not list(nn.parallel.distributed._find_tensors(output)):
                    kind = type(output).__name__
                    entry.opaque = (kind, places.return_line(type(ddp.module).forward, kind))
            return output

        return forward

    def _no_sync(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def no_sync(ddp: DistributedDataParallel) -> Any:
            self._opened = places.here() or self._opened
            return real(ddp)

        return no_sync

    def _entry(self, ddp: DistributedDataParallel) -> _Wrapped | None:
        return next((entry for entry in self._wrapped if entry.held() is ddp), None)

    def _requires_grad(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def requires_grad_(module: nn.Module, requires_grad: bool = True) -> Any:
            self._grad_switched[module] = (requires_grad, places.here())
            return real(module, requires_grad)

        return requires_grad_

    def _checkpoint(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("use_reentrant") is not False and self._inside:
                self._reentrant = self._reentrant or places.here()
            return real(function, *args, **kwargs)

        return checkpoint

    def _module_called(self, module: nn.Module, args: Any) -> None:
        # What a checkpoint recomputes runs inside backward: that is no call past DDP.
        if not self._wrapped or self._inside or self._in_backward or not torch.is_grad_enabled():
            return
        for entry in self._wrapped:
            if entry.past_it is None and module in entry.inner:
                entry.past_it = places.here()

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._in_backward = True
        for entry in self._wrapped:
            ddp = entry.held()
            if ddp is not None and entry.forwards:
                entry.unsynced = None if ddp.require_backward_grad_sync else self._opened

    def _after(self) -> None:
        self._in_backward = False
        for entry in self._wrapped:
            ddp = entry.held()
            if ddp is not None and entry.steps < 2 and entry.forwards:
                entry.unused = {
                    name: place_born(parameter)
                    for name, parameter in ddp.module.named_parameters()
                    if parameter.requires_grad and parameter.grad is None
                }

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_backward = False
        for entry in self._wrapped:
            ddp = entry.held()
            if ddp is None or not (mine := _shared(ddp, optimizer)):
                continue
            made = agreement.made()
            if world_size() > 1 and entry.unsynced is not None and made == entry.collectives:
                self._report_unsynced(entry.unsynced)
            elif (
                world_size() > 1
                and not entry.forwards
                and entry.past_it is not None
                and made == entry.collectives
                and any(parameter.grad is not None for parameter in mine)
            ):
                self._report_bypass(entry.past_it)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for entry in self._wrapped:
            ddp = entry.held()
            if ddp is None or not (mine := _shared(ddp, optimizer)):
                continue
            entry.forwards, entry.past_it, entry.collectives = 0, None, agreement.made()
            entry.unsynced = None
            entry.steps += 1
            which = f"{entry.number}:{_positions(ddp, mine)}"
            entry.compared[which] += 1
            step = entry.compared[which]
            if step < 4 or step & (step - 1) == 0:
                agreement.weights(self.process, which, step, mine, places.here())

    def _report_bypass(self, place: Place) -> None:
        self.process.report(
            Finding(
                kind="ddp-bypassed",
                message="The module inside DistributedDataParallel was called directly, and the optimizer stepped "
                "without a pass through DDP: gradients are not averaged, every rank trains a model of its own.",
                where=place,
                cause=places.cause_at(
                    place, "only a call of the DDP object itself makes the ranks share gradients"
                ),
                fix="Call the DDP object: ddp(x) instead of ddp.module(x); put the loss into forward() if need be.",
                op="DistributedDataParallel.forward",
            )
        )

    def _report_unsynced(self, place: Place) -> None:
        self.process.report(
            Finding(
                kind="ddp-bypassed",
                message="The optimizer stepped although every backward pass since the last step ran inside "
                "no_sync(): gradients are not averaged, every rank trains a model of its own.",
                where=place,
                cause=places.cause_at(place, "inside this the ranks do not share their gradients"),
                fix="Leave no_sync() for the last backward pass before each optimizer.step().",
                op="DistributedDataParallel.no_sync",
            )
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """Say which parameters, and which line made them unused or ready twice."""
        if finding.kind == "ddp-unused":
            return self._why_unused(finding)
        if finding.kind == "ddp-ready-twice":
            opaque = next((entry.opaque for entry in self._wrapped if entry.opaque is not None), None)
            if self._reentrant is not None:
                why = "re-entrant checkpointing runs a backward of its own, in which DDP sees gradients again"
                return replace(finding, cause=places.cause_at(self._reentrant, why))
            if opaque is not None and opaque[1] is not None:
                why = f"DDP finds no tensors in a {opaque[0]} and takes every parameter for unused"
                return replace(
                    finding,
                    cause=places.cause_at(opaque[1], why),
                    fix="Return a tensor, tuple, dict or dataclass from forward(), or set "
                    "find_unused_parameters=False.",
                )
        return finding

    def _why_unused(self, finding: Finding) -> Finding:
        for entry in self._wrapped:
            ddp = entry.held()
            if ddp is None or not entry.unused:
                continue
            cause = None
            for path, module in ddp.module.named_modules():
                switched, place = self._grad_switched.get(module, (False, None))
                if switched and place and any(_within(name, path) for name in entry.unused):
                    cause = places.cause_at(place, "made trainable here, but the loss does not use it")
            vague = finding.cause is None or finding.where is None or finding.cause.line == finding.where.line
            if cause is None:
                cause = self._by_choice(ddp.module, next(iter(entry.unused)))
            if cause is None and vague:
                cause = places.cause_at(
                    next(iter(entry.unused.values())), "made here, but the loss does not use it"
                )
            names = f"Parameters without a gradient: {shown(list(entry.unused))}."
            return replace(finding, message=f"{finding.message}\n{names}", cause=cause or finding.cause)
        return finding

    def _by_choice(self, module: nn.Module, name: str) -> Cause | None:
        """The condition in the owner's forward on which a layer is used or not."""
        path = name.split(".")[:-1]
        owner = module.get_submodule(".".join(path[:-1])) if path else module
        attribute = path[-1] if path else name
        code = getattr(type(owner).forward, "__code__", None)
        line = (
            places.choice_of(code.co_filename, code.co_firstlineno, attribute) if code is not None else None
        )
        return places.cause_at(line, f"whether self.{attribute} is used depends on this")


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")


def _positions(ddp: DistributedDataParallel, parameters: list[torch.Tensor]) -> str:
    """Which of the parameters of a DDP module these are, the same words on every rank."""
    known = {id(parameter): position for position, parameter in enumerate(ddp.module.parameters())}
    given = sorted(known[id(parameter)] for parameter in parameters)
    return "all" if len(given) == len(known) else ",".join(map(str, given))


def _shared(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of a DDP module that an optimizer steps."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in ddp.module.parameters() if id(parameter) in stepped]
