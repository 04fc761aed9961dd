"""What the virtual machine tells the rehearsal: placement faults and collectives. It records, and never stops an op."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from trimtab.diagnose.causes import diagnose
from trimtab.rehearse import places
from trimtab.virtual.observer import Observer

if TYPE_CHECKING:
    from trimtab.diagnose.finding import Finding
    from trimtab.rehearse.process import Process
    from trimtab.virtual.faults import Fault


class RehearsalObserver(Observer):
    """Turns each distinct fault into a finding; a repeated one is only counted."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._known: dict[tuple[object, ...], Finding] = {}
        self._met: Counter[tuple[object, ...]] = Counter()

    def fault(self, fault: Fault) -> None:
        """Diagnose while the stack and the tensors are there to look at."""
        key = (fault.kind, fault.op, tuple(fault.frame) if fault.frame else fault.message)
        finding = self._known.get(key)
        if finding is None:
            finding = diagnose(fault)
            for check in self._process.checks:
                finding = check.enrich(finding, None)
            self._known[key] = finding
        self._process.report(finding)

    def collective(self, record: dict[str, Any]) -> None:
        """Compare with the other ranks before entering."""
        from trimtab.rehearse import agreement

        agreement.enter(self._process, record, places.here())
