"""What the virtual machine tells the rehearsal: placement faults and collectives. It records, and never stops an op."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from trimtab.diagnose import awaited, source
from trimtab.diagnose.causes import diagnose, known_fix
from trimtab.diagnose.finding import KINDS, Finding, device_of
from trimtab.rehearse import places, room_here, shield, shortage
from trimtab.virtual import memory, state
from trimtab.virtual.observer import Asked, Observer

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process
    from trimtab.virtual.faults import Fault

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


class RehearsalObserver(Observer):
    """Turns each distinct fault into a finding; a repeated one is only counted."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._asked: set[Asked] = set()
        self._unproven: set[str] = set()
        self._known: dict[tuple[object, ...], Finding] = {}
        self._full: set[str] = set()
        """Devices that were found too small."""

    def fault(self, fault: Fault) -> None:
        """Diagnose while the stack and the tensors are there to look at."""
        if fault.kind == "out-of-memory" and device_of(fault.message) in self._full:
            return  # from the first allocation that found no room on, all of them are beyond the device
        inner = next((frame for frame in fault.frames if not frame.file.startswith((OWN, _TORCH))), None)
        # One line may meet several stray tensors; where each comes from tells them apart.
        made = tuple(operand.origin for operand in fault.operands)
        key = (fault.kind, fault.op, fault.frame, inner or fault.message, made)
        finding = self._known.get(key)
        if finding is None:
            found = self._found(fault)
            places.forget_all()
            if found is None:
                return
            finding = self._known[key] = found
            if fault.kind == "out-of-memory":
                self._full.add(device_of(fault.message))
                if self._process.full is not None:
                    self._process.full.went_beyond()
        self._process.report(finding)

    def _found(self, fault: Fault) -> Finding | None:
        """What a fault means; None of one that another process has told."""
        # The rehearsal's own hooks stand on the stack; they are neither the user's nor a library's.
        fault.frames = [frame for frame in fault.frames if not frame.file.startswith(OWN)]
        plain = Finding(
            fault.kind if fault.kind in KINDS else "other-error", message=fault.message, op=fault.op
        )
        plain.where = source.place(fault.frame.file, fault.frame.line) if fault.frame else None
        finding = self._echoed(shield.call("diagnosis", diagnose, fault, otherwise=plain))
        if self._of_a_worker(finding):
            return None
        finding = self._process.enriched(finding, None)
        machine = state.machine()
        if fault.kind == "out-of-memory" and machine is not None:
            full, frees = shortage.full_one(fault.message, machine), 0
            for filler in self._process.fillers if finding.fix in ("", known_fix(fault.message)) else ():
                if not frees:
                    finding, frees = shield.call(
                        type(filler).__name__,
                        filler.beside,
                        finding,
                        str(full.device),
                        otherwise=(finding, 0),
                    )
            if not frees and not self._process.ran_a_module and _of_a_module():
                finding.fix = shortage.WHILE_LOADING
            of_cause = finding.fix not in ("", known_fix(fault.message))
            finding.lack = shortage.met(full, of_cause=of_cause, frees=frees)
        return finding

    def catches(self, fault: Fault) -> bool:
        """A full GPU that the program may be ready for: what hardware raises is raised, and its run tells the rest."""
        if fault.kind != "out-of-memory" or self._process.full is None:
            return False
        handler = shield.call("diagnosis", awaited.full_device, sys._getframe(1), otherwise=None)
        if handler is None or self._process.full.is_no_way_on(handler):
            places.forget_all()
            return False
        if device_of(fault.message) not in self._full:  # else the program had ended before, on hardware
            self._process.full.met(fault, handler, self._found)
        places.forget_all()
        return True

    def _echoed(self, finding: Finding) -> Finding:
        """Backward meets the same stray tensor again: that is the fault of the forward pass, not another one."""
        if "backward" not in finding.op or finding.cause is None:
            return finding
        for known in self._known.values():
            if known.kind == finding.kind and known.cause and known.cause.line == finding.cause.line:
                return known
        return finding

    def asked(self, asked: Asked) -> None:
        """Write each line down once."""
        if asked in self._asked:
            return
        self._asked.add(asked)
        lines = [asked.frame, asked.library if asked.library != asked.frame else None]
        where, inside = (asdict(source.place(line.file, line.line)) if line else None for line in lines)
        # Trimtab's own watch over a run asks whether values are finite, and would stop it otherwise.
        own = asked.library is not None and asked.library.file.startswith(source.PACKAGE)
        how = "watch" if own else asked.how
        self._process.recorder.write(t="asked", how=how, op=asked.op, where=where, inside=inside)

    def unproven(self, text: str) -> None:
        """Write it down once; what is only known of values that were made up is no finding from here on."""
        if text not in self._unproven:
            self._unproven.add(text)
            self._process.made_up = True
            self._process.recorder.write(t="unproven", text=text)

    def note(self, text: str) -> None:
        """Write it down; a result tells each once."""
        self._process.recorder.write(t="note", text=text)

    def not_simulated(self, text: str) -> None:
        """Remember it with its line: what the program catches would leave no trace."""
        if text.startswith(memory.SMALL_HOST):
            room_here.say(
                self._process.folder, "the program's values are more than this machine's memory holds"
            )
        if not shield.is_paused():
            self._process.not_simulated.setdefault(text, places.here())

    def _of_a_worker(self, finding: Finding) -> bool:
        """A batch that a forked worker put on the GPU is to be pinned: the worker's fault, which is known already."""
        if finding.kind != "pin-of-gpu-tensor" or finding.cause is not None:
            return False
        found = (r["finding"]["kind"] for r in self._process.others_records() if r["t"] == "finding")
        return "worker-uses-gpu" in found

    def collective(self, record: dict[str, Any]) -> None:
        """Compare with the other ranks before entering."""
        from trimtab.rehearse import agreement

        shield.call("agreement of the ranks", agreement.enter, self._process, record, places.here())

    def message(self, record: dict[str, Any]) -> None:
        """Compare with the other end before it is sent or awaited."""
        from trimtab.rehearse import agreement

        shield.call("agreement of the ranks", agreement.message, self._process, record, places.here())

    def group_made(self, members: list[int]) -> None:
        """Compare with the group that the other ranks make."""
        from trimtab.rehearse import agreement

        shield.call("agreement of the ranks", agreement.group_made, self._process, members, places.here())

    def exchange(self, op: str, tensors: list[torch.Tensor], whole: bool) -> None:
        """Remember who exchanges what: the checks that compare ranks ask."""
        from trimtab.rehearse import exchanges

        shield.call("exchanges of the ranks", exchanges.seen, self._process, op, tensors, whole)


def _of_a_module() -> bool:
    """Whether a module is being made or moved at present."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back
    return False
