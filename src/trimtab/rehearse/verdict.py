"""The verdict of a rehearsal: what was gathered from its processes, judged.

It reads what the processes left and starts or ends none of them.
"""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding
from trimtab.rehearse import blame, folding, memory_told, shortage
from trimtab.rehearse.session import AskedAt, Gathered, stop_file
from trimtab.rehearse.standstill import last_stack
from trimtab.rehearse.traffic import RankTraffic
from trimtab.rehearse.waiting import Child
from trimtab.rehearse.written import Files

Verdict = Literal["clean", "fault", "unproven"]
EXIT_CODES: dict[Verdict, int] = {"clean": 0, "fault": 1, "unproven": 3}


@dataclass
class Result:
    """What a rehearsal found."""

    verdict: Verdict
    findings: list[Finding]
    memory: dict[str, dict[str, Any]]
    """What each GPU held: see `memory_told`."""
    steps: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    """Why nothing is proven, or what limits the verdict."""
    target: str = ""
    """What was rehearsed."""
    shapes_only: bool = False
    """Whether big tensors had shapes and no values."""
    collectives: list[RankTraffic] = field(default_factory=list)
    """What each rank exchanged with the others, in order; of a rank that stands for all, what it would have."""
    asked: list[AskedAt] = field(default_factory=list)
    """Where the program asked a shape for a value: what follows from these is not proven."""
    files: Files = field(default_factory=Files)
    """What became of the files that the program wrote."""
    beyond: list[Finding] = field(default_factory=list)
    """What shows only when the fixes that were tried are in place."""
    ended: bool = True
    """Whether the program came to its end, or to the steps asked for."""
    stopped: bool = False
    """Whether Ctrl-C ended it, or what was tried after it."""
    batches_loaded: bool = False
    """Whether a DataLoader put its rows together."""
    instead: list[str] = field(default_factory=list)
    """The files that were read with another text, to try a fix."""
    placement: dict[str, list[str]] = field(default_factory=dict)
    """The devices of each layer that ran, in the model's order."""
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    """The lines around those that are named here, by file and number."""

    @property
    def exit_code(self) -> int:
        """The verb's exit code."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def judge(
    folder: Path,
    gathered: Gathered,
    children: list[Child],
    timed_out: bool,
    timeout: float,
    seconds: float,
    standstill: Finding | None = None,
    stopped: bool = False,
) -> Result:
    from trimtab.rehearse import agreement, alone, apart_ranks, disagreements, same_rows

    findings, notes = gathered.findings, list(gathered.notes)
    if not any(finding.kind in ("ddp-bypassed", "ranks-disagree") for finding in findings):
        findings += apart_ranks.found(folder)
    findings += same_rows.found(folder) + alone.found(folder)
    if standstill is not None and not any(finding.kind == "ranks-disagree" for finding in findings):
        findings.insert(0, standstill)
    faults = [finding for finding in findings if finding.severity == "fault"]
    if timed_out:
        stuck = disagreements.stuck(agreement.worlds(folder)) if not faults else None
        if stuck is not None:
            findings.insert(0, stuck)
            faults.append(stuck)
    if timed_out or stopped:
        where = _last_places(folder)
        why = f"time ran out after {timeout:g} s" if timed_out else f"you stopped it after {seconds:.0f} s"
        notes.append(why + (f"; it stood at {where}" if where else ""))
    proven = not timed_out and not stopped and not gathered.unproven
    for child in children:
        end = gathered.ends.get(child.pid)
        if timed_out or stopped or standstill is not None or (end is None and stop_file(folder).exists()):
            continue
        if end is None:
            proven = False
            notes.append(_death(child.returncode))
        elif end["how"] == "os._exit" and end["status"] and not faults:
            findings.append(_hard_exit(end["status"]))
            faults.append(findings[-1])
        elif end["how"] == "interrupt":
            proven = False
            notes.append("the script was interrupted")
        elif end["status"] and not faults and not gathered.unproven:
            proven = False
            notes.append(f"the script ended with status {end['status']}, and no fault was seen")
    if proven and not faults and not gathered.used and gathered.on_cpu is not None:
        notes.insert(0, f"it ran on the CPU{gathered.on_cpu}: nothing of it concerns a GPU")
    elif proven and not faults and not gathered.used:
        proven = False
        why = f" ({gathered.untouched})" if gathered.untouched else ""
        notes.insert(0, f"nothing ran on a GPU: no tensor was ever put on one{why}")
    if gathered.stands_for > 1:
        _alike(gathered)
        notes.append(
            f"rank 0 of {gathered.stands_for} stands for all: the others run the same step on rows of their own"
        )
    shortage.measure(findings, gathered.memory)
    notes += memory_told.doubts(gathered.memory)
    deciding = len(
        {str(asked.where or asked.inside or asked.op) for asked in gathered.asked if asked.decides}
    )
    if deciding:
        proven = False
        lines = "one of its lines" if deciding == 1 else f"{deciding} of its lines"
        notes.append(f"what the program does hangs on values that shapes do not have, at {lines}")
    verdict: Verdict = "fault" if faults else "clean" if proven else "unproven"
    return Result(
        verdict,
        folding.fold(findings),
        gathered.memory,
        gathered.steps,
        seconds,
        notes,
        asked=gathered.asked,
        ended=bool(children) and all(child.pid in gathered.ends for child in children),
        batches_loaded=gathered.batches_loaded,
    )


def _alike(gathered: Gathered) -> None:
    """Ranks that were not started use their GPUs as the one that was."""
    used = max(gathered.memory.values(), key=lambda figures: figures["peak_bytes"], default=None)
    for figures in list(gathered.memory.values())[: gathered.stands_for]:
        figures.update(copy.deepcopy(used or {}))
    everywhere = list(gathered.memory)[: gathered.stands_for]
    for devices in gathered.placement.values():
        if len(devices) == 1 and devices[0] in everywhere:
            devices[:] = everywhere


def _hard_exit(status: int) -> Finding:
    return Finding(
        kind="other-error",
        message=f"The script ended its process by os._exit({status})",
        fix="See what the script says above: a status other than 0 means that it gave up.",
    )


def _death(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return f"the script's process was killed by SIGKILL before its end, as when {blame.NO_ROOM}"
    if code is not None and code < 0:
        return f"the script's process was killed by {signal.Signals(-code).name} before its end"
    return f"the script's process ended without a word (status {code})"


def _last_places(folder: Path) -> str:
    """The innermost user lines of the stacks that the processes wrote when time ran out."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("stands-*")):
        for file, line, _ in last_stack(path):
            if source.is_user_file(file):
                found[f"{os.path.relpath(file)}:{line}"] = None
                break
    return ", ".join(found)
