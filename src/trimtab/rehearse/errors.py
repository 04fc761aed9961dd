"""From an error that the script raised to a finding. Leaves out what is only the echo of another process's error."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place
from trimtab.errors import NoRoomError, TrimtabError
from trimtab.rehearse import places
from trimtab.rehearse.session import read_lines

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process

_ECHOES = {"ProcessRaisedException", "ProcessExitedException", "ChildFailedError"}
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms for|Broken pipe|"
    r"gloo/transport|Socket Timeout|wait timeout after|TCPStore|Application timeout caused pair closure|NCCL",
    re.IGNORECASE,
)


def finding_of(error: BaseException, process: Process) -> Finding | None:
    """What an error that ended a process means; None when it says nothing new."""
    if isinstance(error, KeyboardInterrupt):
        return None
    echo = isinstance(error, SystemExit) or type(error).__name__ in _ECHOES
    if echo and _others_found(process):
        return None
    if isinstance(error, SystemExit):
        return _exit_status(error)
    if only_aborted(error, process):
        return None
    if "DataLoader worker process" in str(error) and _worker_told(process):
        return None
    process.recorder.write(t="failed")
    if _not_simulated(error):
        process.recorder.write(t="unproven", text=str(error))
        return None
    stack = places.traceback_places(error.__traceback__)
    if _LOST_PEER.search(str(error)):
        from trimtab.rehearse import agreement

        another, finding = agreement.lost_peer(process, error, stack)
        if another:
            return finding
    if "torch" not in sys.modules:
        return _plain(error, stack)
    from trimtab.diagnose.causes import diagnose_exception

    finding = diagnose_exception(error, stack)
    # What C++ calls meta:1 is the program's cuda:1.
    finding.message = re.sub(r"\bmeta:(\d+)", r"cuda:\1", finding.message)
    return finding


def _not_simulated(error: BaseException) -> bool:
    """Whether the script met something that virtual GPUs lack: that is no fault of the script."""
    if "torch" not in sys.modules:
        return False
    from trimtab.virtual.state import NotSimulated

    return isinstance(error, NotSimulated)


def only_aborted(error: BaseException, process: Process) -> bool:
    """Whether a launcher's error is about ranks that had ended their program and were then killed by a signal.

    A thread of gloo that meets Python's end aborts the process (a race in torch). Ranks that the launcher stopped
    because of it make the rehearsal unproven.
    """
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "ChildFailedError" or not isinstance(failures, dict) or not failures:
        return False
    started: set[int] = set()
    ended: set[int] = set()
    for path in process.folder.glob("records-*.jsonl"):
        for record in read_lines(path):
            if record["t"] == "start" and record["parent"] == os.getpid():
                started.add(record["pid"])
            if record["t"] == "end" and not record["status"]:
                ended.add(record["pid"])
    if not all(failure.exitcode < 0 and failure.pid in ended for failure in failures.values()):
        return False
    if started - ended:
        text = "a rank was aborted by gloo after its end, and the launcher stopped the others; try again"
        process.recorder.write(t="unproven", text=text)
    return True


def _plain(error: BaseException, stack: list[Place]) -> Finding:
    """An error of a script that never came to import torch."""
    where = places.first_own(stack)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        where = source.place(error.filename, error.lineno)
    return Finding(
        kind="other-error",
        message=f"{type(error).__name__}: {error}",
        where=where,
        library=stack[0] if stack and stack[0] != where and not isinstance(error, SyntaxError) else None,
        fix="The script stops here on any machine: repair this first.",
    )


def _exit_status(error: SystemExit) -> Finding | None:
    if error.code in (None, 0):
        return None
    if isinstance(error.__context__, TrimtabError):
        return _refused(error.__context__)
    said = f"exit status {error.code}" if isinstance(error.code, int) else str(error.code)
    return Finding(
        kind="other-error",
        message=f"The script ended itself: {said}",
        where=places.first_own(places.traceback_places(error.__traceback__)),
        fix="See what the script says above; give it the arguments or files that it asks for.",
    )


def _refused(error: TrimtabError) -> Finding:
    """Trimtab itself said why a run cannot be: that is the finding."""
    said, _, change = str(error).partition("\n  change: ")
    found, _, why = said.partition("\n  why: ")
    return Finding(
        kind="out-of-memory" if isinstance(error, NoRoomError) else "other-error",
        message=f"{found}: {why}" if why else found,
        fix=change,
    )


def _worker_told(process: Process) -> bool:
    """Whether a worker has said itself that it touched the GPU, of which the loader's error is only the echo."""
    found = (r["finding"]["kind"] for r in process.others_records() if r["t"] == "finding")
    return "worker-uses-gpu" in found


def _others_found(process: Process) -> bool:
    """Whether another process of this rehearsal has a finding, or met what cannot be told."""
    return any(
        record["t"] == "unproven" or (record["t"] == "finding" and record["finding"]["severity"] == "fault")
        for record in process.others_records()
    )
