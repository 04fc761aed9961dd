"""The parent's wait for the processes of a rehearsal, until all have ended, one has failed, all stand still or time is
out; and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from trimtab.diagnose.finding import Finding
from trimtab.rehearse.room_here import Watch
from trimtab.rehearse.session import read_lines, stop_file
from trimtab.rehearse.standstill import Standstill
from trimtab.rehearse.system import belongs

Child = subprocess.Popen[bytes]

_GRACE = 20.0
"""Seconds that the other ranks get to end by themselves after one has failed."""
_AFTER_STOP = 3.0
"""Seconds that workers tied by RPC get to end by themselves after one has made the steps asked for."""


def wait(
    children: list[Child], deadline: float, folder: Path, room: Watch | None = None
) -> tuple[bool, Finding | None]:
    """Wait for all; true when time ran out, a finding when all ranks wait for each other.

    A rank that fails leaves the others a short while. `room`: an eye on this machine's memory, whose end is theirs.
    """
    standstill = Standstill(folder)
    failed_at: float | None = None
    stopped = stop_file(folder)
    while True:
        codes = [child.poll() for child in children]
        now = time.monotonic()
        if all(code is not None for code in codes):
            return False, None
        if room is not None and room.seen():
            return False, None
        if stopped.exists() and time.time() > stopped.stat().st_mtime + _AFTER_STOP:
            return False, None
        if failed_at is None and any(c.returncode and not had_ended(folder, c) for c in children):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE:
            return False, None
        if now > deadline:
            let_all_tell(folder)
            return True, None
        if failed_at is None and (found := standstill.seen()) is not None:
            return False, found
        time.sleep(0.05)


def let_all_tell(folder: Path) -> None:
    """Let every process of the rehearsal write down where it stands."""
    signal_all(folder, signal.SIGUSR2)
    time.sleep(0.5)


def had_ended(folder: Path, child: Child) -> bool:
    """Whether a process had come to its end before a signal ended it (a thread of gloo that met Python's end)."""
    path = folder / f"records-{child.pid}.jsonl"
    return (
        child.returncode < 0
        and path.exists()
        and any(record["t"] == "end" and not record["status"] for record in read_lines(path))
    )


def signal_all(folder: Path, number: signal.Signals) -> None:
    """Send a signal to every living process of the rehearsal, also to a launcher's ranks in groups of their own."""
    for path in folder.glob("stands-*"):
        process = int(path.name.removeprefix("stands-"))
        if belongs(folder, process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def end_group(child: Child) -> None:
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
