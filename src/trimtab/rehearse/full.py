"""What a program makes of a full GPU whose error it may catch. The error is raised, as on hardware, and its run tells.

A program that works on goes on: a note; so does one whose loop had done work before, takes its next turn and comes to
its own end (the last batch is left out). One that does no more of what it was doing (it tells the error and returns,
raises it again, leaves out every batch) ends there: a fault. The parent is told which line took the error, and
rehearses again past the end of the memory, so that the whole need is known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse import shortage
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, optimizers_made
from trimtab.rehearse.loop_turns import LoopTurns
from trimtab.virtual import imports, state

if TYPE_CHECKING:
    from trimtab.rehearse.phases import Phases
    from trimtab.rehearse.process import Process
    from trimtab.virtual.observer import Fault
    from trimtab.virtual.state import VirtualDevice

_ZEROTH = "trimtab.zeroth.optimizer"
_STEPS = ("first step", "steady step")


@dataclass(frozen=True)
class _Met:
    """A full GPU of which is not known yet whether the program goes on."""

    device: VirtualDevice
    phase: str
    allocations: int
    """How many had been made."""
    handler: Place
    finding: Finding | None
    said: str


class FullGpus(BaseCheck):
    """Follows whether work goes on after a GPU was full."""

    def __init__(self, process: Process, phases: Phases) -> None:
        super().__init__(process)
        self._phases = phases
        self._open: list[_Met] = []
        self._left_out: list[_Met] = []
        """Those after which a loop that had done work before has taken its next turn."""
        self._turns = LoopTurns(self._turned)
        self._failed = False

    def install(self) -> None:
        self._made = optimizers_made()
        register_optimizer_step_post_hook(lambda *_: self._stepped())
        nn.modules.module.register_module_forward_hook(self._left)
        backward_hub().after.append(self._differentiated)
        machine = state.machine()
        assert machine is not None
        imports.when_imported(machine, machine.undo, {_ZEROTH: _listen_to(self)})

    def is_no_way_on(self, handler: Place) -> bool:
        """Whether the program was seen to end with what this line does."""
        return _named(handler) in self.process.settings.no_way_on

    def met(self, fault: Fault, handler: Place, found: Callable[[Fault], Finding | None]) -> None:
        """A GPU is full, and a line may catch that."""
        machine = state.machine()
        assert machine is not None
        device = shortage.full_one(fault.message, machine)
        at = f" at {fault.frame.file}:{fault.frame.line}" if fault.frame is not None else ""
        same = fault.frame is not None and fault.frame.file == handler.file
        where = f"line {handler.line}" if same else f"{os.path.basename(handler.file)}:{handler.line}"
        said = f"{device.device} is full{at}: the program catches that ({where}), "
        # One finding is enough to tell of: where it stood at first.
        finding = found(fault) if not self._open else None
        self._open.append(_Met(device, device.ledger.lap.phase, device.made, handler, finding, said))
        self._turns.failed(in_a_step=self._open[-1].phase in _STEPS)

    def went_beyond(self) -> None:
        """The memory is full where nothing catches that: what the program does from here on is no handling of it."""
        self._turns.stop()
        self._open, self._left_out = [], []

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """An error that ends the program was no end of its own."""
        self._failed |= error is not None
        return finding

    def finish(self) -> None:
        """The program is at its end: what is still open has ended it."""
        self._turns.stop()
        self._went_on(lambda met: met.phase == "save" or self._computed_by_hand(met))
        if self._failed:
            self._open = self._left_out + self._open
        else:
            for met in self._left_out:
                text = f"{met.said}leaves that turn of its loop out and comes to its end"
                self.process.recorder.write(t="note", text=text)
        for met in self._open:
            self.process.recorder.write(t="ended-full", handler=_named(met.handler))
        if self._open and (finding := self._open[0].finding) is not None:
            self.process.report(finding)

    def _computed_by_hand(self, met: _Met) -> bool:
        """Whether a program without modules and gradients went on: there is nothing else to see it by."""
        by_hand = not self.process.ran_a_module and not self.process.differentiated
        return by_hand and met.device.made > met.allocations

    def _went_on(self, after: Callable[[_Met], bool]) -> None:
        if not self._open and not self._left_out:
            return
        for met in filter(after, self._left_out + self._open):
            self.process.recorder.write(t="note", text=f"{met.said}and goes on")
        self._open = [met for met in self._open if not after(met)]
        self._left_out = [met for met in self._left_out if not after(met)]
        if not self._open:
            self._turns.stop()

    def _turned(self) -> None:
        self._left_out += self._open
        self._open = []

    def _stepped(self) -> None:
        self._turns.stepped()
        self._went_on(lambda met: True)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        """A pass is whole. In a step it is only a part of what has to fit."""
        if not torch.is_grad_enabled():
            if not self._phases.in_a_pass:
                self._turns.passed()
            self._went_on(lambda met: met.phase not in _STEPS)
        else:
            self._went_on(lambda met: met.phase in ("load", "resume", "save"))

    def _differentiated(self) -> None:
        if not self._made:
            self._turns.stepped()
            self._went_on(lambda met: True)


def _named(handler: Place) -> str:
    return f"{handler.file}:{handler.line}"


def _listen_to(full: FullGpus) -> imports.Setting:
    """Steps that no optimizer of torch makes."""

    def step(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        full._stepped()
        return result

    def put_in(_: Any) -> None:
        around(sys.modules[_ZEROTH].ZerothOrder, "step", step, whose="FullGpus")

    return put_in
