"""What the operating system tells of processes and threads, by /proc. Where there is none, nothing is told.

Reads only; it never signals or ends a process.
"""

from __future__ import annotations

import os
from pathlib import Path

from trimtab.rehearse.session import VARIABLE


def belongs(folder: Path, process: int) -> bool:
    """Whether a living process is part of the rehearsal in this folder. A launcher puts its ranks into groups of their
    own, so that the process group does not tell."""
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False
    return f"{VARIABLE}={folder}".encode() in environment.split(b"\0")


def sleeps(process: int, *, without: int = -1) -> bool:
    """Whether every thread of a process (but that one) waits: none is ready to run, stopped, or held up by a disk."""
    for path in Path(f"/proc/{process}/task").glob("[0-9]*/stat"):
        fields = _fields(path)
        if fields and fields[0] in "RDT" and int(path.parent.name) != without:
            return False
    return True


def processor_seconds(process: int) -> float | None:
    """Processor time of a process; None when it is gone."""
    fields = _fields(Path(f"/proc/{process}/stat"))
    if not fields or fields[0] == "Z":
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes() -> list[tuple[int, int]]:
    """The ids of the living processes and of their groups."""
    found = ((int(path.parent.name), _fields(path)) for path in Path("/proc").glob("[0-9]*/stat"))
    return [(process, int(fields[2])) for process, fields in found if fields and fields[0] != "Z"]


def _fields(path: Path) -> list[str]:
    """What follows "pid (name)" (a name may hold spaces): state, parent, group, …; nothing when it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
