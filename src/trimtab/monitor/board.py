"""What the ranks of a run tell each other by files, which work while every exchange between them is stuck.

In `.trimtab-ranks/` of the run's folder each rank keeps one file, `rank3.json`: who it is (process, machine, who
started it) and, when it has been silent or has ended, where it stands. The main process makes the folder once it is
this run's; the others write only where they find it, so that nothing is put into a folder that may still be refused.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil

from trimtab.files import write_json_whole
from trimtab.reading import parse_json

FOLDER = ".trimtab-ranks"
VERDICT = "verdict.json"
ASKED = "asked"
# A process's start is told in seconds since the boot, and the clock that this is counted from is set now and then.
_SAME_START = 3.0


@dataclass(frozen=True)
class Process:
    """One process, known again also when its number has been given to another."""

    pid: int
    started: float
    host: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process of that number on this machine; None where there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time(), platform.node())
        except psutil.Error:
            return None

    @classmethod
    def read(cls, found: Any) -> Self | None:
        try:
            return cls(int(found["pid"]), float(found["started"]), str(found["host"]))
        except (TypeError, LookupError, ValueError):
            return None

    @property
    def here(self) -> bool:
        return self.host == platform.node()

    def same(self, other: Process | None) -> bool:
        if other is None or (self.pid, self.host) != (other.pid, other.host):
            return False
        return abs(self.started - other.started) < _SAME_START

    def standing(self) -> str | None:
        """How it is: `running`, `stopped` (by SIGSTOP), `gone`; None for one on another machine."""
        if not self.here:
            return None
        if not self.same(Process.of(self.pid)):
            return "gone"
        try:
            status = psutil.Process(self.pid).status()
        except psutil.Error:
            return "gone"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return "stopped" if stopped else "running"


@dataclass(frozen=True)
class RankReport:
    """What one rank last said of itself."""

    rank: int
    process: Process
    agent: Process | None = None
    """Who started it, under torchrun."""
    world: int = 1
    state: str = "runs"
    """runs, silent or failed."""
    at: float = 0.0
    """When this was written."""
    step: int | None = None
    doing: str = ""
    silence: float = 0.0
    """Seconds since it last got something done."""
    place: str = ""
    idle: bool = False
    """It uses neither its processor nor its GPU, and its stack does not move."""
    collective: dict[str, Any] | None = None
    """The exchange it waits in, or else the last one that it ended; see collectives.py."""
    error: str = ""

    @classmethod
    def read(cls, found: Any) -> Self | None:
        try:
            process = Process.read(found["process"])
            if process is None:
                return None
            return cls(**{**found, "process": process, "agent": Process.read(found["agent"])})
        except (TypeError, LookupError):
            return None


class Board:
    """One rank's place among the others. Writing is never worth a run: a disk that refuses is left alone."""

    def __init__(self, run_dir: Path, rank: int, world: int) -> None:
        self.folder = run_dir / FOLDER
        self.rank, self.world = rank, world
        own = Process.of(os.getpid())
        assert own is not None, "this process runs"
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self.report = RankReport(rank, own, Process.of(os.getppid()) if under_torchrun else None, world)

    def open(self) -> None:
        """By the main process, once the folder is its run's. What earlier ranks said is past."""
        self.folder.mkdir(exist_ok=True)
        for path in (*self.folder.glob("rank*.json"), self.folder / VERDICT, self.folder / ASKED):
            path.unlink(missing_ok=True)
        self.tell()

    def tell(self, **news: Any) -> None:
        """Write where this rank stands."""
        self.report = replace(self.report, at=time.time(), **news)
        self._write(f"rank{self.rank}.json", asdict(self.report))

    def read(self) -> dict[int, RankReport]:
        """What every rank last said, this one among them; of a rank that said nothing there is nothing."""
        return {report.rank: report for report in reports_in(self.folder) if report.world == self.world}

    def ask(self) -> object:
        """Have every rank say where it is. What is returned tells this asking from the next."""
        with contextlib.suppress(OSError):
            if self.folder.is_dir():
                (self.folder / ASKED).write_text(f"rank {self.rank} at {time.time()}", encoding="utf-8")
        return self.asked()

    def asked(self) -> object:
        """The last asking, whoever's; None where there was none."""
        try:
            return (self.folder / ASKED).stat().st_mtime_ns
        except OSError:
            return None

    def give_verdict(self, text: str) -> None:
        """What all ranks end with."""
        self._write(VERDICT, {"at": time.time(), "rank": self.rank, "text": text})

    def verdict(self) -> tuple[int, str] | None:
        """Who gave it, and what it says. One from before this process was is an earlier attempt's."""
        return verdict_in(self.folder, self.report.process.started)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        if not self.folder.is_dir():
            return
        try:
            write_json_whole(self.folder / name, content)
        except OSError:
            # A full disk is told by whoever writes something that counts.
            return


def reports_in(folder: Path) -> list[RankReport]:
    """Whatever ranks said in this folder, of whichever launch."""
    found = (RankReport.read(_read(path)) for path in sorted(folder.glob("rank*.json")))
    return [report for report in found if report is not None]


def verdict_in(folder: Path, since: float) -> tuple[int, str] | None:
    """What ranks ended with after that time."""
    found = _read(folder / VERDICT)
    try:
        return (int(found["rank"]), str(found["text"])) if float(found["at"]) >= since else None
    except (TypeError, LookupError, ValueError, OverflowError):
        return None


def _read(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
