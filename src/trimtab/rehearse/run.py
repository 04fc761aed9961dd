"""The parent of a rehearsal: starts the script's process (or its ranks), waits within a time limit, gives the verdict.

It never imports torch (but for reading a torchrun line) and never runs the user's code in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding
from trimtab.errors import RequestError
from trimtab.rehearse import blame, files_aside, folding, hints, instead, one_rank, rank_variables
from trimtab.rehearse.process import SETUP
from trimtab.rehearse.session import VARIABLE, AskedAt, Gathered, Settings, gather, read_lines
from trimtab.rehearse.standstill import Standstill, last_stack
from trimtab.rehearse.system import belongs
from trimtab.rehearse.target import Target, parse_target
from trimtab.rehearse.written import Files
from trimtab.virtual import bootstrap

Child = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Rank:
    """A process that is to be started."""

    arguments: Sequence[str]
    """The words for `trimtab.rehearse.child`."""
    environment: dict[str, str]
    interpreter: Sequence[str] = ()
    """Options of python itself."""
    enter: Callable[[], None] | None = None
    """To be called in the new process before anything else: puts it where its writes change nothing."""


Start = Callable[[Rank], Child]
Verdict = Literal["clean", "fault", "unproven"]
EXIT_CODES: dict[Verdict, int] = {"clean": 0, "fault": 1, "unproven": 3}

_GRACE = 20.0
"""Seconds that the other ranks get to end by themselves after one has failed."""


@dataclass
class Result:
    """What a rehearsal found."""

    verdict: Verdict
    findings: list[Finding]
    memory: dict[str, dict[str, int]]
    steps: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    """Why nothing is proven, or what limits the verdict."""
    target: str = ""
    """What was rehearsed."""
    shapes_only: bool = False
    """Whether big tensors had shapes and no values."""
    asked: list[AskedAt] = field(default_factory=list)
    """Where the program asked a shape for a value: what follows from these is not proven."""
    files: Files = field(default_factory=Files)
    """What became of the files that the program wrote."""
    beyond: list[Finding] = field(default_factory=list)
    """What shows only when the fixes that were tried are in place."""
    instead: list[str] = field(default_factory=list)
    """The files that were read with another text, to try a fix."""

    @property
    def exit_code(self) -> int:
        """The verb's exit code."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def _start(rank: Rank) -> Child:
    command = [sys.executable, *rank.interpreter, "-m", "trimtab.rehearse.child", *rank.arguments]
    return subprocess.Popen(command, env=rank.environment, start_new_session=True, preexec_fn=rank.enter)


def rehearse(
    words: list[str],
    settings: Settings,
    *,
    ranks: int | None = None,
    timeout: float = 600.0,
    start: Start = _start,
    keep: Path | None = None,
    in_place: bool = False,
) -> Result:
    """Rehearse what the words name. The script's output goes where ours goes.

    What the script writes is thrown away, or moved to the folder `keep`; with `in_place` it is written for real.
    """
    folder = Path(tempfile.mkdtemp(prefix="trimtab-rehearsal-"))
    try:
        target = parse_target(words, scratch=folder, gpus=settings.gpus if settings.gpus_given else None)
        visible = target.visible_gpus()
        if visible is not None and not settings.gpus_given:
            settings.gpus = max([0, *visible]) + 1
        per_node = ranks or target.ranks or (settings.gpus if visible is None else len(visible)) or 1
        world = per_node * target.nodes
        settings.launched = world if target.launched or ranks is not None else 0
        if not settings.gpus_given and visible is None:
            settings.gpus = max(settings.gpus, per_node, target.gpus)
        with files_aside.files(words, folder, settings, keep=keep, in_place=in_place) as files:
            settings.save(folder)
            started = time.monotonic()
            with _reserved_port() as port:
                launch = _Launch(port, secrets.token_hex(4), per_node, world)
                children = [
                    start(
                        Rank(
                            target.for_rank(rank % per_node),
                            _environment(folder, settings, rank, launch, target),
                            target.interpreter,
                            files.enter,
                        )
                    )
                    for rank in range(1 if settings.shapes_only else world)
                ]
                try:
                    timed_out, standstill = _wait(children, started + timeout, folder)
                    # Before the rest is ended: a rank that sees another go would report that.
                    gathered = gather(folder)
                finally:
                    for child in children:
                        _end_group(child)
                    _signal_all(folder, signal.SIGKILL)
            seconds = time.monotonic() - started
            if gathered.refused:
                raise RequestError(gathered.refused)
            gathered.notes += target.notes
            hints.set_aside(gathered, target, files)
            result = _result(folder, gathered, children, timed_out, timeout, seconds, standstill)
            result.notes += hints.hints(result.findings, gathered, target)
            result.target, result.shapes_only, result.files = (
                target.name,
                settings.shapes_only,
                files.gather(),
            )
            result.instead = sorted(instead.used(folder))
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Launch:
    """What the ranks of one rehearsal share."""

    port: int
    run: str
    per_node: int
    world: int


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port for the ranks to meet at. It is bound and not listened on: the system gives it to nobody else, and the
    ranks' store, which asks for reuse as well, may still take it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def _environment(
    folder: Path, settings: Settings, rank: int, launch: _Launch, target: Target
) -> dict[str, str]:
    # Which GPUs of this machine may be used says nothing about the virtual ones; what the line itself says, does.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment.update(target.environment)
    visible = target.visible_gpus()
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
    environment[VARIABLE] = str(folder)
    environment[bootstrap.VARIABLE] = json.dumps(_machine(settings))
    path = (str(bootstrap.SITE), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if settings.instead:
        environment[bootstrap.START] = instead.START
    if settings.launched:
        given = one_rank.variables(rank, launch.per_node, launch.world, launch.port, launch.run)
        environment.update(rank_variables.of(target.launcher, given))
    return environment


def _machine(settings: Settings) -> dict[str, Any]:
    """The virtual machine that every process of the rehearsal gets when it imports torch."""
    return {
        "count": settings.gpus,
        "memory": settings.memory_bytes,
        "name": settings.gpu_name,
        "capability": list(settings.capability),
        "on_fault": "repair",
        "shapes": settings.shapes_only,
        "visible_at_install": None,
        "setup": SETUP,
    }


def _wait(children: list[Child], deadline: float, folder: Path) -> tuple[bool, Finding | None]:
    """Wait for all; true when time ran out, a finding when all ranks wait for each other.

    A rank that fails leaves the others a short while.
    """
    standstill = Standstill(folder)
    failed_at: float | None = None
    while True:
        codes = [child.poll() for child in children]
        now = time.monotonic()
        if all(code is not None for code in codes):
            return False, None
        if failed_at is None and any(c.returncode and not _had_ended(folder, c) for c in children):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE:
            return False, None
        if now > deadline:
            # Let every process of the rehearsal write down where it stands.
            _signal_all(folder, signal.SIGUSR2)
            time.sleep(0.5)
            return True, None
        if failed_at is None and (found := standstill.seen()) is not None:
            return False, found
        time.sleep(0.05)


def _had_ended(folder: Path, child: Child) -> bool:
    """Whether a process had come to its end before a signal ended it (a thread of gloo that met Python's end)."""
    path = folder / f"records-{child.pid}.jsonl"
    return (
        child.returncode < 0
        and path.exists()
        and any(record["t"] == "end" and not record["status"] for record in read_lines(path))
    )


def _signal_all(folder: Path, number: signal.Signals) -> None:
    """Send a signal to every living process of the rehearsal, also to a launcher's ranks in groups of their own."""
    for path in folder.glob("stands-*"):
        process = int(path.name.removeprefix("stands-"))
        if belongs(folder, process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def _end_group(child: Child) -> None:
    """End what is left of a child's own process group, gently, then for good."""
    for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        end = time.monotonic() + patience
        while time.monotonic() < end:
            child.poll()
            try:
                os.killpg(child.pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.05)
    child.wait()


def _result(
    folder: Path,
    gathered: Gathered,
    children: list[Child],
    timed_out: bool,
    timeout: float,
    seconds: float,
    standstill: Finding | None = None,
) -> Result:
    from trimtab.rehearse import agreement, apart_ranks, disagreements, same_rows

    findings, notes = gathered.findings, list(gathered.notes)
    if not any(finding.kind in ("ddp-bypassed", "ranks-disagree") for finding in findings):
        findings += apart_ranks.found(folder)
    findings += same_rows.found(folder)
    if standstill is not None and not any(finding.kind == "ranks-disagree" for finding in findings):
        findings.insert(0, standstill)
    faults = [finding for finding in findings if finding.severity == "fault"]
    if timed_out:
        stuck = disagreements.stuck(agreement.worlds(folder)) if not faults else None
        if stuck is not None:
            findings.insert(0, stuck)
            faults.append(stuck)
        where = _last_places(folder)
        notes.append(f"time ran out after {timeout:g} s" + (f"; it stood at {where}" if where else ""))
    proven = not timed_out and not gathered.unproven
    for child in children:
        end = gathered.ends.get(child.pid)
        if timed_out or standstill is not None:
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
    deciding = sum(asked.decides for asked in gathered.asked)
    if deciding:
        proven = False
        notes.append(
            f"what the program does hangs on values that shapes do not have, at {deciding} of its lines"
        )
    verdict: Verdict = "fault" if faults else "clean" if proven else "unproven"
    return Result(
        verdict, folding.fold(findings), gathered.memory, gathered.steps, seconds, notes, asked=gathered.asked
    )


def _alike(gathered: Gathered) -> None:
    """Ranks that were not started use their GPUs as the one that was."""
    used = max(gathered.memory.values(), key=lambda figures: figures["peak_bytes"], default=None)
    for figures in list(gathered.memory.values())[: gathered.stands_for]:
        figures.update(used or {})


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
