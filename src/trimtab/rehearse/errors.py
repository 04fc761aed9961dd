"""From an error that the script raised to a finding. Leaves out what is only the echo of another process's error."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from typing import TYPE_CHECKING

from trimtab.diagnose import source
from trimtab.diagnose.finding import CARRIED, UNKNOWN, Finding, Place
from trimtab.errors import NoRoomError, RequestError, TrimtabError
from trimtab.rehearse import blame, old_code, packages, places, room_here, shield, unreachable
from trimtab.rehearse.session import read_lines

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process

UNPROVEN = "_trimtab_unproven"
"""Where an error that a worker raised carries why it proves nothing."""
_NOT_REACHED = "data could not be reached, and what comes after it was not rehearsed"
_KILLED = re.compile(
    r"terminated with signal SIGKILL|killed by signal: Killed|terminated abruptly|Exit code -9"
)
_ECHOES = {"ProcessRaisedException", "ProcessExitedException", "ChildFailedError"}
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms for|Broken pipe|"
    r"gloo/transport|Socket Timeout|wait timeout after|TCPStore|Application timeout caused pair closure|NCCL",
    re.IGNORECASE,
)
_STOPPED = re.compile(r"\bStopRehearsal: \d+ optimizer steps made")


def stopped_as_asked(error: BaseException, process: Process) -> bool:
    """Whether an error only says that the steps asked for were made: here, or on another worker, of whose end RPC tells
    the words and a collective that the connection is lost."""
    from trimtab.rehearse.process import StopRehearsal

    if isinstance(error, StopRehearsal) or _STOPPED.search(str(error)):
        return True
    lost = isinstance(error, Exception) and _LOST_PEER.search(str(error)) is not None
    return lost and any(record["t"] == "stopped" for record in process.others_records())


def finding_of(error: BaseException, process: Process) -> Finding | None:
    """What an error that ended a process means; None when it says nothing new, or nothing about the program."""
    if isinstance(error, KeyboardInterrupt):
        return None
    echo = isinstance(error, SystemExit) or type(error).__name__ in _ECHOES
    if echo and _others_found(process):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    if only_aborted(error, process):
        return None
    if "DataLoader worker process" in str(error) and _worker_told(process):
        return None
    process.recorder.write(t="failed")
    refused = error.__context__
    if isinstance(refused, RequestError) and not isinstance(refused, NoRoomError):
        process.recorder.write(t="refused", text=str(refused))
        return None
    if _LOST_PEER.search(str(error)):
        from trimtab.rehearse import agreement

        another, finding = agreement.lost_peer(process, error, places.traceback_places(error.__traceback__))
        if another:
            return finding
    finding, unproven = looked_at(error)
    doubt = _doubt(process, error, finding) if not unproven and finding is not None else ""
    if doubt:
        finding, unproven = None, f"it then stopped with {type(error).__name__}: {error}; {doubt}"
    if unproven:
        if unproven.endswith(blame.NO_ROOM) and not _KILLED.search(str(error)):
            room_here.say(process.folder, "the program asks for more memory than this machine has")
        process.recorder.write(t="unproven", text=unproven)
    return finding


def _doubt(process: Process, error: BaseException, finding: Finding) -> str:
    """Why a program that stops here might not on a GPU."""
    if process.made_up:
        return "whether real values lead there is not known"
    # What CUDA would say stays true; an error of Python may come of the way that the program took instead.
    if process.not_simulated and finding.kind == "other-error":
        return "whether it comes there on a GPU is not known"
    place = unknown_way(error, finding.kind) if process.settings.shapes_only else ""
    if place:
        return f"that hangs on values, which shapes do not have ({place})"
    return ""


def unknown_way(error: BaseException, kind: str) -> str:
    """Where shapes alone were rehearsed: the line at which a size, or the way to this error, hung on unknown values."""
    from trimtab.virtual.state import machine

    here = machine()
    entered = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for asked in here.asked if here is not None else ():
        at = asked.frame or asked.library
        # Every size that comes after may follow from an unknown one; a branch leads on from where it is.
        led = (
            asked.how == "decision"
            and kind == "other-error"
            and at is not None
            and any(code.co_filename == at.file and code.co_name == at.function for code in entered)
        )
        if asked.how == "shape" or led:
            return f"{os.path.basename(at.file)}:{at.line}" if at is not None else asked.op
    return ""


def looked_at(error: BaseException) -> tuple[Finding | None, str]:
    """The finding for an error, and why nothing is proven by it (either may be missing)."""
    if getattr(error, UNPROVEN, ""):
        return None, str(getattr(error, UNPROVEN))
    if (carried := getattr(error, CARRIED, None)) is not None and carried["severity"] == "warning":
        reason = _NOT_REACHED if carried["kind"] == "data-unreachable" else carried["message"]
        return Finding.from_dict(carried), reason
    links = blame.chain(error)
    stack = places.traceback_places(error.__traceback__)
    if any(map(unreachable.is_unreachable, links)):
        where = next(filter(None, (places.first_own(_places(link)) for link in links[::-1])), None)
        return unreachable.finding_for(links, stack, where), _NOT_REACHED
    told = packages.unbuilt(links)
    if told is None and (lacks := packages.missing(links)) is not None:
        told = packages.finding_for(*lacks, _places(lacks[1]))
    if told is not None:
        return told, f"{told.message}: what comes after it was not rehearsed"
    if _KILLED.search(str(error)):
        return None, f"a process of the script was killed (SIGKILL): {blame.NO_ROOM}"
    judged = [(link, blame.judge(link)) for link in links if not isinstance(link, SystemExit)]
    for link, said in judged:
        if said.whose == "unproven":
            return None, _stopped(link, said.why)
    for link in blame.everything_before(error):
        if link not in links and (why := blame.not_ours_to_tell(link)):
            return None, _stopped(link, why)
    if isinstance(error, SystemExit):
        return _exit_status(error), ""
    # What a library, or the program, has wrapped in an error of its own is told at the line that failed.
    error, said = next((pair for pair in judged[::-1] if pair[1].whose in ("simulated", "proven")), judged[0])
    stack = _places(error)
    if "torch" not in sys.modules:
        return _plain(error, stack), ""
    from trimtab.diagnose.causes import diagnose_exception
    from trimtab.diagnose.explain import match_message

    if said.whose == "open" and match_message(f"{type(error).__name__}: {error}") is None:
        return None, _stopped(error, said.why or "it could not be repeated without virtual GPUs")
    found = shield.call("diagnosis", diagnose_exception, error, stack, otherwise=_plain(error, stack))
    finding: Finding = found
    if finding.fix == UNKNOWN:
        _mend(finding, error, said.fix)
    # What C++ calls meta:1 is the program's cuda:1.
    finding.message = re.sub(r"\bmeta:(\d+)", r"cuda:\1", finding.message)
    return finding, ""


def _places(error: BaseException) -> list[Place]:
    return places.traceback_places(error.__traceback__)


def _stopped(error: BaseException, why: str) -> str:
    where = places.first_own(_places(error))
    if type(error).__name__ in ("NotSimulated", "InternalError"):
        return f"{error} ({os.path.basename(where.file)}:{where.line})" if where is not None else str(error)
    said = (str(error).strip().splitlines() or [""])[0]
    at = f"at {os.path.basename(where.file)}:{where.line} " if where is not None else ""
    return f"{at}the script stopped with {type(error).__name__}: {said[:300]}; {why}"


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
    finding = Finding(
        kind="other-error",
        message=f"{type(error).__name__}: {error}",
        where=where,
        library=stack[0] if stack and stack[0] != where and not isinstance(error, SyntaxError) else None,
    )
    _mend(finding, error, f"raised by Python code before torch was there: {UNKNOWN}")
    return finding


def _mend(finding: Finding, error: BaseException, otherwise: str) -> None:
    """What to change where nothing is known of the error's words."""
    file = finding.where.file if finding.where is not None else ""
    said, finding.edits = old_code.fix_for(error, file)
    finding.fix = packages.own_module(error) or said or otherwise


def _exit_status(error: SystemExit) -> Finding:
    if isinstance(error.__context__, TrimtabError):
        return _refused(error.__context__)
    said = f"exit status {error.code}" if isinstance(error.code, int) else str(error.code)
    refused = _by_argparse(error)
    fix = "See what the script says above; give it the arguments or files that it asks for."
    if re.search(r"unrecognized arguments:.*--local-rank=\d", refused):
        fix = (
            "torch.distributed.launch hands each rank --local-rank=N, since torch 2.0 with a dash: take it as "
            'parser.add_argument("--local-rank", "--local_rank", type=int), or start by torchrun and read '
            'os.environ["LOCAL_RANK"]'
        )
    return Finding(
        kind="other-error",
        message=f"The script ended itself: {said}" + (f" ({refused})" if refused else ""),
        where=places.first_own(places.traceback_places(error.__traceback__)),
        fix=fix,
    )


def _by_argparse(error: SystemExit) -> str:
    """What argparse, or a parser made of it, had against the arguments."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        parser = frame.f_locals.get("self")
        if frame.f_code.co_name == "error" and isinstance(parser, argparse.ArgumentParser):
            return str(frame.f_locals.get("message", ""))
    return ""


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
