"""DistributedDataParallel: calls that go past it, models that drift apart, and the causes of its own errors."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import flow, mends_ranks, source
from trimtab.diagnose.finding import Cause, Finding, Place, cause_at
from trimtab.rehearse import agreement, apart_ranks, exchanges, places
from trimtab.rehearse.checks.base import (
    BaseCheck,
    around,
    backward_hub,
    place_born,
    shown,
    trained_by,
    world_size,
)

_Real = Callable[..., Any]


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
    at: Place | None = None
    """The line that wrapped the module."""
    known: set[int] = field(default_factory=set)
    """The parameters that it had then, by id: no other is averaged."""
    ran: WeakSet[nn.Module] = field(default_factory=WeakSet)
    opaque: tuple[str, Place | None] | None = None
    alone: Counter[tuple[Callable[[Place], None], Place]] = field(default_factory=Counter)
    """Steps that were made without a word to the other ranks, and how each is told."""
    averagings: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """The trained parameters, by id: at the end of a script the module itself may be gone."""
    own_hook: bool = False


class Ddp(BaseCheck):
    """Follows every DDP wrapper of this process."""

    def install(self) -> None:
        self._wrapped: list[_Wrapped] = []
        self._pid = -1
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

    def _living(self) -> Iterator[tuple[_Wrapped, DistributedDataParallel]]:
        return ((entry, ddp) for entry in self._wrapped if (ddp := entry.held()) is not None)

    def _made(
        self, real: _Real, ddp: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        real(ddp, module, *args, **kwargs)
        entry = _Wrapped(ref(ddp), len(self._wrapped), WeakSet(module.modules()))
        entry.collectives = agreement.made()
        entry.at = places.here()
        entry.known = {id(parameter) for parameter in module.parameters()}
        self._pid = os.getpid()
        self._wrapped.append(entry)

    def _forward(self, real: _Real, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        self._inside += 1
        try:
            output = real(ddp, *args, **kwargs)
        finally:
            self._inside -= 1
        for entry in (entry for entry, known in self._living() if known is ddp and torch.is_grad_enabled()):
            entry.forwards += 1
            if entry.opaque is None and not list(nn.parallel.distributed._find_tensors(output)):
                kind = type(output).__name__
                entry.opaque = (kind, flow.return_line(type(ddp.module).forward, kind))
        return output

    def _no_sync(self, real: _Real, ddp: DistributedDataParallel) -> Any:
        self._opened = places.here() or self._opened
        return real(ddp)

    def _requires_grad(self, real: _Real, module: nn.Module, requires_grad: bool = True) -> Any:
        self._grad_switched[module] = (requires_grad, places.here())
        return real(module, requires_grad)

    def _checkpoint(self, real: _Real, function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_reentrant") is not False and self._inside:
            self._reentrant = self._reentrant or places.here()
        return real(function, *args, **kwargs)

    def _module_called(self, module: nn.Module, args: Any) -> None:
        if self._inside and torch.is_grad_enabled():
            for entry in self._wrapped:
                if module in entry.inner:
                    entry.ran.add(module)
        # What a checkpoint recomputes runs inside backward: that is no call past DDP.
        if not self._wrapped or self._inside or self._in_backward or not torch.is_grad_enabled():
            return
        for entry in self._wrapped:
            if entry.past_it is None and module in entry.inner:
                entry.past_it = places.here()

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._in_backward = True
        for entry, ddp in self._living():
            if entry.forwards:
                entry.unsynced = None if ddp.require_backward_grad_sync else self._opened

    def _after(self) -> None:
        self._in_backward = False
        for entry, ddp in self._living():
            if entry.steps < 2 and entry.forwards:
                entry.unused = {
                    name: place_born(parameter)
                    for name, parameter in ddp.module.named_parameters()
                    if parameter.requires_grad and parameter.grad is None
                }

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_backward = False
        for entry, ddp in self._living():
            mine = _shared(ddp, optimizer)
            if not mine or world_size() < 2:
                continue
            self._compare(entry, ddp, mine)
            if agreement.made() != entry.collectives:
                continue
            # Told at the end: who averages the weights every few steps means it so.
            if entry.unsynced is not None:
                entry.alone[self._report_unsynced, entry.unsynced] += 1
            elif not entry.forwards and entry.past_it is not None and any(p.grad is not None for p in mine):
                entry.alone[self._report_bypass, entry.past_it] += 1

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for entry, ddp in self._living():
            if not _shared(ddp, optimizer):
                continue
            entry.forwards, entry.past_it, entry.collectives = 0, None, agreement.made()
            entry.unsynced = None
            entry.steps += 1

    def _compare(self, entry: _Wrapped, ddp: DistributedDataParallel, mine: list[torch.Tensor]) -> None:
        """Write down the weights with which a step begins: what averages them after a step has done so by then."""
        which = f"{entry.number}:{_positions(ddp, mine)}"
        entry.compared[which] += 1
        step = entry.compared[which]
        entry.sizes |= {id(parameter): parameter.numel() for parameter in mine if parameter.requires_grad}
        entry.own_hook = _own_hook(ddp)
        averaged = exchanges.averagings != entry.averagings
        entry.averagings = exchanges.averagings
        if step <= 16 or step & (step - 1) <= 1 or averaged:
            late = [p for p in mine if id(p) not in entry.known and p.requires_grad]
            apart_ranks.weights(self.process, which, step, mine, places.here(), _born_late(late), averaged)

    def finish(self) -> None:
        for entry, ddp in self._living():
            # A worker that was forked from this rank ends too, and may not touch the GPU.
            if entry.steps and os.getpid() == self._pid and world_size() > 1:
                everything = list(ddp.module.parameters())
                apart_ranks.weights(self.process, f"{entry.number}:end", entry.steps + 1, everything, None)
        for entry in self._wrapped if os.getpid() == self._pid else ():
            self._alone(entry)

    def _alone(self, entry: _Wrapped) -> None:
        """Tell steps that were made alone, unless the program brings the weights together in a way of its own."""
        averages = exchanges.averages(entry.sizes)
        later = self.process.cut_off and not averages and _averages_later()
        if averages or later or (self.process.cut_off and entry.own_hook):
            why = "cut off" if self.process.cut_off else "averages"
            agreement.note(self.process, {"own_way": str(entry.number), "why": why})
        if averages or later:
            return
        for (report, place), times in entry.alone.items():
            for _ in range(times):
                report(place)

    def _report_bypass(self, place: Place) -> None:
        self.report(
            "ddp-bypassed",
            "The module inside DistributedDataParallel was called directly, and the optimizer stepped without a pass "
            "through DDP: gradients are not averaged, every rank trains a model of its own.",
            place,
            cause_at(place, "only a call of the DDP object itself makes the ranks share gradients"),
            fix="Call the DDP object: ddp(x) instead of ddp.module(x); put the loss into forward() if need be.",
            op="DistributedDataParallel.forward",
        )

    def _report_unsynced(self, place: Place) -> None:
        self.report(
            "ddp-bypassed",
            "The optimizer stepped although every backward pass since the last step ran inside no_sync(): gradients "
            "are not averaged, every rank trains a model of its own.",
            place,
            cause_at(place, "inside this the ranks do not share their gradients"),
            fix="Leave no_sync() for the last backward pass before each optimizer.step().",
            op="DistributedDataParallel.no_sync",
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """Say which parameters, and which line made them unused or ready twice."""
        if finding.kind == "device-mismatch" and self._inside:
            return self._for_another_gpu(finding)
        if finding.kind == "ddp-unused":
            return self._why_unused(finding)
        if finding.kind == "ddp-ready-twice":
            opaque = next((entry.opaque for entry in self._wrapped if entry.opaque is not None), None)
            if self._reentrant is not None and not (finding.edits and finding.cause is not None):
                why = "re-entrant checkpointing runs a backward of its own, in which DDP sees gradients again"
                return replace(finding, cause=cause_at(self._reentrant, why))
            if opaque is not None and opaque[1] is not None:
                why = f"DDP finds no tensors in a {opaque[0]} and takes every parameter for unused"
                return replace(
                    finding,
                    cause=cause_at(opaque[1], why),
                    fix="Return a tensor, tuple, dict or dataclass from forward(), or set "
                    "find_unused_parameters=False.",
                )
        return finding

    def _for_another_gpu(self, finding: Finding) -> Finding:
        """DDP moves what it is given to device_ids[0]: that has to be where the module is."""
        for entry, ddp in self._living():
            moved = ddp.device_ids[0] if ddp.device_ids else None
            own = next((p.device for p in ddp.module.parameters()), None)
            if entry.at is None or moved is None or own is None or own.index == moved:
                continue
            why = f"DDP moves its inputs to cuda:{moved} here, and the module is on {own}"
            code, edits = mends_ranks.own_gpu(entry.at)
            fix = f"Name the GPU that the module is on: device_ids=[{code}]."
            return replace(finding, cause=cause_at(entry.at, why), fix=fix, edits=edits)
        return finding

    def _why_unused(self, finding: Finding) -> Finding:
        for entry, ddp in self._living():
            if not entry.unused:
                continue
            cause = None
            for path, module in ddp.module.named_modules():
                switched, place = self._grad_switched.get(module, (False, None))
                if switched and place and any(_within(name, path) for name in entry.unused):
                    cause = cause_at(place, "made trainable here, but the loss does not use it")
            name, made = next(iter(entry.unused.items()))
            cause = cause or self._by_choice(ddp.module, name)
            path = name.rpartition(".")[0]
            idle = made is not None and ddp.module.get_submodule(path) not in entry.ran
            if cause is None and (finding.vague or idle):
                cause = cause_at(made, "made here, but the loss does not use it")
            names = f"Parameters without a gradient: {shown(list(entry.unused))}."
            message = f"{finding.message}\n{names}"
            if not idle or entry.at is None:
                return replace(finding, message=message, cause=cause or finding.cause)
            fix = (
                f"Freeze what is not used before DDP takes the model ({path or name}.requires_grad_(False)), leave "
                f"it out, or let DDP look for it: find_unused_parameters=True (line {entry.at.line})."
            )
            edits = mends_ranks.looking_for_unused(entry.at)
            return replace(finding, message=message, cause=cause or finding.cause, fix=fix, edits=edits)
        return finding

    def _by_choice(self, module: nn.Module, name: str) -> Cause | None:
        """The condition in the owner's forward on which a layer is used or not."""
        path = name.split(".")[:-1]
        owner = module.get_submodule(".".join(path[:-1])) if path else module
        attribute = path[-1] if path else name
        code = getattr(type(owner).forward, "__code__", None)
        line = flow.choice_of(code.co_filename, code.co_firstlineno, attribute) if code else None
        return cause_at(line, f"whether self.{attribute} is used depends on this")


def _own_hook(ddp: DistributedDataParallel) -> bool:
    """Whether gradients are brought together by more than a plain all-reduce."""
    hooks = [hook for hook, _ in getattr(ddp, "_comm_hooks", [])]
    return any(
        not str(getattr(hook, "__module__", "")).endswith("ddp_comm_hooks.default_hooks") for hook in hooks
    )


def _averages_later() -> bool:
    """Whether the program has a line that exchanges weights, to which it has not come."""
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    own = sorted(file for file in files if file.endswith(".py") and source.is_user_file(file))
    return any(apart_ranks.averages_elsewhere(file, exchanges.ran) for file in own)


def _born_late(parameters: list[torch.Tensor]) -> Place | None:
    return next((place for p in parameters if (place := place_born(p)) is not None), None)


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")


def _positions(ddp: DistributedDataParallel, parameters: list[torch.Tensor]) -> str:
    """Which of the parameters of a DDP module these are, the same words on every rank."""
    known = {id(parameter): position for position, parameter in enumerate(ddp.module.parameters())}
    given = sorted(known[id(parameter)] for parameter in parameters)
    return "all" if len(given) == len(known) else ",".join(map(str, given))


def _shared(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of a DDP module that an optimizer steps."""
    stepped = {id(parameter) for parameter in trained_by(optimizer)}
    return [parameter for parameter in ddp.module.parameters() if id(parameter) in stepped]
