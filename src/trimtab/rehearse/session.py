"""The private folder in which a rehearsal's processes leave what they find, and how it is read back.

Each process appends JSON lines to a file of its own, unbuffered, so that nothing is lost when it is killed. Nothing
here imports torch.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimtab.diagnose.finding import Finding, Place, place_from
from trimtab.rehearse import memory_told

VARIABLE = "TRIMTAB_REHEARSAL"
"""Names the folder to every process of a rehearsal."""


@dataclass
class Settings:
    """What every process of a rehearsal has to know."""

    gpus: int = 1
    gpus_given: bool = False
    """Whether so many were asked for; otherwise every rank has one."""
    memory_bytes: int = 80 * 2**30
    gpu_name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    max_steps: int | None = None
    shapes_only: bool = False
    """Whether big tensors have shapes and no values; then one rank stands for all, unless every rank is asked for."""
    every_rank: bool = False
    """Whether all ranks are started also where tensors have shapes only."""
    no_way_on: list[str] = field(default_factory=list)
    """Lines that take the error of a full GPU and with which the program was seen to end: none is raised for them."""
    what_if: list[str] = field(default_factory=list)
    """Changes that are made to the program to see what memory they save (`what_if`)."""
    instead: dict[str, str] = field(default_factory=dict)
    """Source files that are read with another text (a fix that is tried), by absolute path."""
    apart: dict[str, str] = field(default_factory=dict)
    """The folders whose writes go to an overlay, and the mount that each really lies on."""
    launched: int = 0
    """How many ranks the rehearsal itself started (0: the script is on its own)."""

    @property
    def one_rank(self) -> bool:
        """Whether one rank stands for all."""
        return self.shapes_only and not self.every_rank

    def save(self, folder: Path) -> None:
        """Write for the processes to come."""
        (folder / "settings.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Settings:
        """Read in a child."""
        data = json.loads((folder / "settings.json").read_text())
        return cls(**{**data, "capability": tuple(data["capability"])})


def stands_file(folder: Path, process: int) -> Path:
    """Where a process of a rehearsal writes its stack when it is asked; there from its beginning on."""
    return folder / f"stands-{process}"


def stop_file(folder: Path) -> Path:
    """There once the steps asked for were made by a worker without which the others cannot end."""
    return folder / "stopped"


class Recorder:
    """Writes this process's records. After a fork it goes on in a file of the new process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pid = -1
        self._file = -1
        self._counts: dict[tuple[object, ...], int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread of the parent may have held it.
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Say that this process is there."""
        with self._lock:
            self._open()

    def write(self, **record: Any) -> None:
        """Append one record."""
        with self._lock:
            self._open()
            os.write(self._file, (json.dumps(record) + "\n").encode())

    def finding(self, finding: Finding) -> None:
        """Record a finding, or count it if this process has already met it."""
        with self._lock:
            self._open()
            key = finding.key()
            count = self._counts.get(key, 0) + 1
            self._counts[key] = count
            if count == 1:
                self._numbers[key] = len(self._numbers)
                self.write(t="finding", id=self._numbers[key], finding=finding.to_dict())
            elif count & (count - 1) == 0:
                self.write(t="count", id=self._numbers[key], n=count)

    def write_path(self) -> Path:
        """This process's file."""
        return self.folder / f"records-{os.getpid()}.jsonl"

    def flush(self) -> None:
        """Write the final counts."""
        with self._lock:
            self._open()
            for key, count in self._counts.items():
                if count > 1:
                    self.write(t="count", id=self._numbers[key], n=count)

    def _open(self) -> None:
        if self._pid == os.getpid():
            return
        forked = self._pid != -1
        self._pid = os.getpid()
        self._counts, self._numbers = {}, {}
        self._file = os.open(self.write_path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.write(t="start", pid=self._pid, parent=os.getppid(), forked=forked)


WORDS = {
    "value": "read",
    "decision": "decided by",
    "shape": "sized by",
    "copy": "copied",
    "watch": "watched by",
}
"""How a value was asked for, in words."""
DECIDING = ("decision", "shape")
"""The ways by which what the program does hangs on it."""


@dataclass(frozen=True)
class AskedAt:
    """A line at which the program asked a tensor for a value, where only its shape is known."""

    how: str
    """value (taken to be shown), decision (branched on), shape (of another tensor), copy (into host memory), watch (by
    Trimtab, whether it is finite)."""
    op: str
    where: Place | None
    inside: Place | None
    """The line of a library, where that is what asked."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AskedAt:
        """Back from its JSON form."""
        return cls(data["how"], data["op"], place_from(data["where"]), place_from(data["inside"]))

    @property
    def decides(self) -> bool:
        """Whether the program's way, or the size of a tensor, hangs on it."""
        return self.how in DECIDING


@dataclass
class Gathered:
    """What all processes of a rehearsal left behind."""

    findings: list[Finding] = field(default_factory=list)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    placement: dict[str, list[str]] = field(default_factory=dict)
    """The devices of each layer that ran, of all processes."""
    steps: int = 0
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    """How each process ended, by process id; one that was killed is missing."""
    notes: list[str] = field(default_factory=list)
    asked: list[AskedAt] = field(default_factory=list)
    stands_for: int = 1
    """How many ranks the one that ran stands for."""
    unproven: bool = False
    """Whether something was met that a rehearsal cannot tell."""
    used: bool = False
    """Whether any process put a tensor on a GPU."""
    batches_loaded: bool = False
    """Whether a DataLoader put rows together."""
    on_cpu: str | None = None
    """Set where a program needs no GPU: the words for it (it asks for the CPU itself, or reads rows alone)."""
    untouched: str = ""
    """Why one did not, as far as it can be seen."""
    ended_full: list[str] = field(default_factory=list)
    """Lines that took the error of a full GPU, after which the program did no more work."""
    refused: str = ""
    """What Trimtab itself said of a config that cannot be run."""


def gather(folder: Path) -> Gathered:
    """Read all records; equal findings of several processes become one, counted together."""
    result = Gathered()
    merged: dict[tuple[object, ...], Finding] = {}
    for path in sorted(folder.glob("records-*.jsonl"), key=lambda p: p.stat().st_mtime_ns):
        mine: dict[int, Finding] = {}
        counts: dict[int, int] = {}
        memory: dict[str, dict[str, Any]] = {}
        for record in read_lines(path):
            match record["t"]:
                case "finding":
                    mine[record["id"]] = Finding.from_dict(record["finding"])
                    counts[record["id"]] = 1
                case "count":
                    counts[record["id"]] = max(counts.get(record["id"], 1), record["n"])
                case "batches-loaded":
                    result.batches_loaded = True
                case "on-cpu":
                    result.on_cpu = record["text"]
                case "untouched":
                    result.untouched = result.untouched or record["text"]
                case "memory":
                    result.used |= record["used"]
                    memory = record["devices"]
                case "placement":
                    for layer, devices in record["layers"].items():
                        known = result.placement.get(layer, [])
                        # By number, whichever process wrote first.
                        result.placement[layer] = sorted(
                            {*known, *devices}, key=lambda name: (len(name), name)
                        )
                case "steps":
                    result.steps = max(result.steps, record["n"])
                case "note" | "unproven":
                    result.unproven |= record["t"] == "unproven"
                    if record["text"] not in result.notes:
                        result.notes.append(record["text"])
                case "ended-full":
                    result.ended_full.append(record["handler"])
                case "refused":
                    result.refused = result.refused or record["text"]
                case "asked":
                    one = AskedAt.from_dict(record)
                    if one not in result.asked:
                        result.asked.append(one)
                case "stands-for":
                    result.stands_for = max(result.stands_for, record["n"])
                case "end":
                    result.ends[record["pid"]] = record
        result.memory = memory_told.joined(result.memory, memory)
        for number, finding in mine.items():
            first = merged.setdefault(finding.key(), finding)
            first.count = counts[number] + (first.count if first is not finding else 0)
    result.findings = sorted(merged.values(), key=lambda finding: finding.severity != "fault")
    return result


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a record file; a last line cut off by a kill is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
