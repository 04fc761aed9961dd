"""Ranks that wait for each other for ever: seen from outside, long before the time limit.

When no rank has entered a collective for a while, every rank is asked where it stands. If all of them stand inside
torch.distributed (or in a backward pass that waits for it) and none uses the processor, nobody will ever go on. Needs
/proc; where there is none, nothing is seen and the time limit decides.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.diagnose import answers, source
from trimtab.diagnose.branches import Said
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import disagreements, group_rings
from trimtab.rehearse.session import read_lines
from trimtab.rehearse.system import processor_seconds, sleeps

_QUIET = 8.0
"""Seconds without a new collective before is looked at all."""
_IDLE = 3.0
"""Seconds in which no rank may use the processor."""
_USED = 0.05
"""Processor seconds below which a process counts as waiting."""
_WAITS = re.compile(
    r"/torch/(distributed/(distributed_c10d|rendezvous|_functional_collectives)|autograd/(graph|__init__)|_tensor"
    r"|nn/parallel/distributed)\.py$"
)
_DISPATCH = re.compile(
    r"/trimtab/virtual/\w+\.py$|/torch/(_ops|_library/\w+|utils/_python_dispatch|overrides)\.py$"
)
_PAIRED = re.compile(r"(?:i?send|i?recv|batch_isend|send_object|recv_object)")
"""A send and its receive stand under branches on the rank by right."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


@dataclass
class _Rank:
    number: int
    process: int
    used: float = 0.0


class Standstill:
    """Asked again and again while the ranks run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked_at = 0.0
        self._waiting: dict[str, tuple[float, list[_Rank]]] = {}
        """For each world: since when nothing moves, and its ranks as they were then."""

    def seen(self) -> Finding | None:
        """A finding once all ranks of one world stand still."""
        now = time.monotonic()
        if now < self._looked_at + 1.0:
            return None
        self._looked_at = now
        for world in {path.stem.split("-")[1] for path in self._folder.glob("collectives-*.jsonl")}:
            found = self._look(world, now)
            if found is not None:
                return found
        return None

    def _look(self, world: str, now: float) -> Finding | None:
        paths = sorted(self._folder.glob(f"collectives-{world}-*.jsonl"))
        since, before = self._waiting.pop(world, (now, []))
        if len(paths) < 2 or time.time() - max(path.stat().st_mtime for path in paths) < _QUIET:
            return None
        ranks = [_Rank(int(path.stem.split("-")[2]), _pid(path)) for path in paths]
        for rank in ranks:
            used = processor_seconds(rank.process)
            # Of one that has ended, the transport tells the others; one that does not sleep would go on if it could.
            if used is None or not sleeps(rank.process):
                return None
            rank.used = used
        if len(before) != len(ranks) or any(
            new.used - old.used > _USED for new, old in zip(ranks, before, strict=True)
        ):
            since, before = now, ranks
        if now - since < _IDLE:
            self._waiting[world] = (since, before)
            return None
        return self._ask(ranks, paths)

    def _ask(self, ranks: list[_Rank], paths: list[Path]) -> Finding | None:
        for rank in ranks:
            try:
                os.kill(rank.process, signal.SIGUSR2)
            except ProcessLookupError:
                return None
        time.sleep(0.5)
        stands: list[_Stand] = []
        for rank, path in zip(ranks, paths, strict=True):
            stand = standing(rank.number, last_stack(self._folder / f"stands-{rank.process}"))
            if stand is None:
                return None
            # What it wrote down last tells of where it stands, if that is the line.
            last = [record for record in read_lines(path) if "op" in record][-1:]
            met = bool(last) and [tuple(at) for at in last[0]["way"]][:1] == stand.way[:1]
            if met:
                members = tuple(last[0]["members"])
                stand = stand._replace(values=last[0]["values"], members=members)
            stands.append(stand)
        return finding(stands)


class _Stand(NamedTuple):
    """Where a rank waits: the program's line, what it called there, and the lines that led to it, innermost first."""

    rank: int
    place: Place
    name: str
    way: list[tuple[str, int]]
    values: Sequence[Any] = ()
    """What it had in its names then, as far as that is known."""
    members: tuple[int, ...] = ()
    """The ranks of the group in whose collective it waits, if these are not all."""


def standing(rank: int, stack: list[tuple[str, int, str]]) -> _Stand | None:
    """Where the program waits for other ranks; none for one that does something else."""
    # A collective of DTensor or FSDP2 is an operator: it waits below the dispatcher.
    waits = next((file for file, _, _ in stack if not _DISPATCH.search(file.replace(os.sep, "/"))), "")
    own = next((n for n, (file, _, _) in enumerate(stack) if source.is_user_file(file)), None)
    if own is None or not _WAITS.search(waits.replace(os.sep, "/")):
        return None
    file, line, _ = stack[own]
    way = [(file, line) for file, line, _ in stack if source.is_user_file(file)]
    # torch wraps its collectives to log them.
    called = [name for inner, _, name in stack[:own] if not inner.endswith("c10d_logger.py")]
    return _Stand(rank, source.place(file, line), called[-1] if called else "", way)


def finding(stands: list[_Stand]) -> Finding:
    """What is told of ranks that all wait: the branch on the rank that parts two of them, else both lines."""
    sides = "; ".join(
        f"rank {one.rank} stands in {one.name}{_of(one.members)} at {os.path.basename(one.place.file)}:{one.place.line}"
        for one in stands
    )
    first = stands[0]
    other = next((side for side in stands if side.place != first.place), stands[-1])
    message = f"Every rank waits and none goes on: {sides}."
    point_to_point = any(_PAIRED.match(one.name) for one in stands)
    both = answers.sides((first.rank, first.values), (other.rank, other.values))
    said = group_rings.told([(one.rank, one.members, one.place) for one in stands])
    if said is None and not point_to_point:
        said = disagreements.at_rest([first.way, other.way], both)
    if said is None:
        fix = "All ranks have to make the same collective calls in the same order; a receive needs a send on the other "
        why = f"rank {other.rank} waits here for what rank {first.rank} never does"
        said = Said(cause_at(other.place, why), f"{fix}side, which must not wait for a receive itself.")
    return said.finding(message, first.place, first.name)


def _of(members: tuple[int, ...]) -> str:
    return f" of ranks {', '.join(map(str, members))}" if members else ""


def last_stack(path: Path) -> list[tuple[str, int, str]]:
    """The last stack that a process wrote, innermost frame first."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    last = text[max(text.rfind("Current thread"), text.rfind("Stack (most recent"), 0) :]
    return [(file, int(line), name) for file, line, name in _FRAME.findall(last)]


def _pid(path: Path) -> int:
    with path.open() as file:
        return int(json.loads(file.readline())["pid"])
