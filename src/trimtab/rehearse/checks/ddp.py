"""DistributedDataParallel: calls that go past it, models that drift apart, and the causes of its own errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import flow, mends_drift, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import agreement, diverged, exchanges, places, rank_records
from trimtab.rehearse.checks import ddp_errors
from trimtab.rehearse.checks.base import (
    BaseCheck,
    around,
    backward_hub,
    place_born,
    trained_by,
    world_size,
)
from trimtab.rehearse.checks.ddp_errors import Wrapped
from trimtab.rehearse.checks.drift import Drift, sums_of

_Real = Callable[..., Any]


class Ddp(BaseCheck):
    """Follows every DDP wrapper of this process."""

    def install(self) -> None:
        self._wrapped: list[Wrapped] = []
        self._pid = -1
        self._inside = 0
        self._in_backward = False
        self._reentrant: Place | None = None
        self._opened: Place | None = None
        self._grad_switched: WeakKeyDictionary[nn.Module, tuple[bool, Place | None]] = WeakKeyDictionary()
        around(DistributedDataParallel, "__init__", self._made)
        around(DistributedDataParallel, "forward", self._forward)
        around(DistributedDataParallel, "no_sync", self._no_sync)
        around(Join, "__enter__", self._joins)
        around(nn.Module, "requires_grad_", self._requires_grad)
        around(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        self._drift = Drift(self.process, self._wrapped)
        nn.modules.module.register_module_forward_pre_hook(self._module_called)
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)
        register_optimizer_step_pre_hook(self._step)
        register_optimizer_step_post_hook(self._stepped)

    def _living(self) -> Iterator[tuple[Wrapped, DistributedDataParallel]]:
        return ((entry, ddp) for entry in self._wrapped if (ddp := entry.held()) is not None)

    def _made(
        self, real: _Real, ddp: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        real(ddp, module, *args, **kwargs)
        entry = Wrapped(ref(ddp), len(self._wrapped), WeakSet(module.modules()))
        entry.collectives = agreement.made()
        entry.at, entry.module = places.here(), ref(module)
        for parameter in module.parameters():
            (entry.averaged if parameter.requires_grad else entry.frozen).add(id(parameter))
            entry.memory.add(exchanges.memory(parameter))
        if not getattr(ddp, "broadcast_buffers", True):
            own = list(_own_buffers(module))
            entry.buffers = {exchanges.memory(buffer): name for name, buffer in own}
            entry.began = {name: sums_of([buffer]) for name, buffer in own}
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

    def _joins(self, real: _Real, joined: Join) -> Any:
        """Ranks make unequal numbers of steps by right: what each holds at its step of one number is not comparable."""
        for entry in self._wrapped:
            agreement.note(self.process, {"own_way": str(entry.number), "why": "joins"})
        return real(joined)

    def _requires_grad(self, real: _Real, module: nn.Module, requires_grad: bool = True) -> Any:
        self._grad_switched[module] = (requires_grad, places.here())
        return real(module, requires_grad)

    def _checkpoint(self, real: _Real, function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_reentrant") is not False and self._inside:
            self._reentrant = self._reentrant or places.here()
        return real(function, *args, **kwargs)

    def _module_called(self, module: nn.Module, args: Any) -> None:
        for entry in self._wrapped if self._inside else ():
            if module in entry.inner and torch.is_grad_enabled():
                entry.ran.add(module)
            elif module in entry.inner:
                entry.switched_off[module] = places.here()
        # What a checkpoint recomputes runs inside backward: that is no call past DDP.
        if not self._wrapped or self._inside or self._in_backward or not torch.is_grad_enabled():
            return
        for entry in self._wrapped:
            if entry.past_it is None and module in entry.inner:
                entry.past_it = _outside(entry)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._in_backward = self._drift.paused = True
        for entry, ddp in self._living():
            if entry.forwards:
                entry.unsynced = None if ddp.require_backward_grad_sync else self._opened

    def _after(self) -> None:
        self._in_backward = self._drift.paused = False
        for entry, ddp in self._living():
            given = [p.grad for p in ddp.module.parameters() if p.grad is not None]
            entry.gradients, entry.changed = {exchanges.memory(g) for g in given} - {0}, []
            if entry.steps < 2 and entry.forwards:
                entry.unused = {
                    name: place_born(parameter)
                    for name, parameter in ddp.module.named_parameters()
                    if parameter.requires_grad and parameter.grad is None
                }

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_backward, self._drift.paused = False, True
        self._without_wrapper(optimizer)
        for entry, ddp in self._living():
            mine = _shared(ddp, optimizer)
            if not mine or world_size() < 2:
                continue
            self._drift.compare(entry, ddp, optimizer, mine)
            _compare_weights(entry, ddp)
            if agreement.made() != entry.collectives:
                continue
            # Told at the end: who averages the weights every few steps means it so.
            if entry.unsynced is not None:
                entry.alone[self._report_unsynced, entry.unsynced] += 1
            elif not entry.forwards and entry.past_it is not None and any(p.grad is not None for p in mine):
                entry.alone[self._report_bypass, entry.past_it] += 1

    def _without_wrapper(self, optimizer: torch.optim.Optimizer) -> None:
        """A module that is trained on after its wrapper is gone, by calls that nothing averages."""
        stepped = {id(parameter) for parameter in trained_by(optimizer)}
        known = exchanges.shared | exchanges.averaged
        for _, ddp in self._living():
            known |= {id(parameter) for parameter in ddp.module.parameters()}
        for entry in (entry for entry in self._wrapped if entry.held() is None):
            module = entry.module() if entry.module is not None else None
            mine = [p for p in module.parameters() if id(p) in stepped] if module is not None else []
            trained = any(p.grad is not None for p in mine) and not any(id(p) in known for p in mine)
            if trained and entry.past_it is not None and world_size() > 1:
                entry.alone[self._report_bypass, entry.past_it] += 1
            entry.past_it = None

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._drift.paused = False
        for entry, ddp in self._living():
            if not _shared(ddp, optimizer):
                continue
            entry.forwards, entry.past_it, entry.collectives = 0, None, agreement.made()
            entry.unsynced = None
            entry.left = _weights(ddp) if entry.alone else None
            entry.steps += 1

    def finish(self) -> None:
        for entry, ddp in self._living():
            _compare_weights(entry, ddp)
            # A worker that was forked from this rank ends too, and may not touch the GPU.
            if entry.steps and os.getpid() == self._pid and world_size() > 1:
                everything = list(ddp.module.parameters())
                diverged.note(self.process, ddp, f"{entry.number}:end", entry.steps + 1, everything, {})
        for entry in self._wrapped if os.getpid() == self._pid else ():
            self._alone(entry)

    def _alone(self, entry: Wrapped) -> None:
        """Tell steps that were made alone, unless the program brings the weights together in a way of its own."""
        # An exchange of something of the weights' shape may be a look at them: who averages, writes as well.
        wrote = self.process.cut_off or entry.moved or entry.written or exchanges.shared & entry.sizes.keys()
        averages = bool(wrote) and exchanges.averages(entry.sizes)
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
        fix = mends_drift.through_ddp(place)
        self.report(
            "ddp-bypassed",
            "The module inside DistributedDataParallel was called directly, and the optimizer stepped without a pass "
            "through DDP: gradients are not averaged, every rank trains a model of its own.",
            place,
            cause_at(fix.place, "only a call of the DDP object itself makes the ranks share gradients"),
            fix=fix.text,
            op="DistributedDataParallel.forward",
            edits=fix.edits,
        )

    def _report_unsynced(self, place: Place) -> None:
        fix = mends_drift.synced(place)
        self.report(
            "ddp-bypassed",
            "The optimizer stepped although every backward pass since the last step ran inside no_sync(): gradients "
            "are not averaged, every rank trains a model of its own.",
            place,
            cause_at(place, "inside this the ranks do not share their gradients"),
            fix=fix.text,
            op="DistributedDataParallel.no_sync",
            edits=fix.edits,
        )

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """Say which parameters, and which line made them unused or ready twice."""
        if finding.kind == "ddp-ready-twice":
            return ddp_errors.ready_twice(finding, self._wrapped, self._reentrant)
        for entry, ddp in self._living():
            if finding.kind == "ddp-unused" and entry.unused:
                return ddp_errors.unused(finding, entry, ddp, self._grad_switched)
            told = ddp_errors.for_another_gpu(finding, entry, ddp) if self._inside else None
            if finding.kind == "device-mismatch" and told is not None:
                return told
        return finding


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of floating-point numbers, without a normalisation's: its statistics may be each rank's own."""
    for path, inner in module.named_modules():
        for name, buffer in inner.named_buffers(path, recurse=False):
            if buffer.is_floating_point() and "norm" not in type(inner).__name__.lower():
                yield name, buffer


def _weights(ddp: DistributedDataParallel) -> float:
    with torch.no_grad():
        return sum(float(p.detach().double().abs().sum()) for p in ddp.module.parameters() if not p.is_meta)


def _compare_weights(entry: Wrapped, ddp: DistributedDataParallel) -> None:
    if entry.left is not None and not entry.moved:
        entry.moved = _weights(ddp) != entry.left


def _outside(entry: Wrapped) -> Place | None:
    """The innermost of the program's lines that is not inside the wrapped module's own methods."""
    for frame in places.frames():
        owner = frame.f_locals.get("self")
        if not (isinstance(owner, nn.Module) and owner in entry.inner):
            return source.place(frame.f_code.co_filename, frame.f_lineno)
    return places.here()


def _averages_later() -> bool:
    """Whether the program has a line that exchanges weights, to which it has not come."""
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    own = sorted(file for file in files if file.endswith(".py") and source.is_user_file(file))
    return any(rank_records.averages_elsewhere(file, exchanges.ran) for file in own)


def _shared(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of a DDP module that an optimizer steps."""
    stepped = {id(parameter) for parameter in trained_by(optimizer)}
    return [parameter for parameter in ddp.module.parameters() if id(parameter) in stepped]
