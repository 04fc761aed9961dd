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
from dataclasses import dataclass
from pathlib import Path

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place, cause_at
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
        return self._ask(ranks)

    def _ask(self, ranks: list[_Rank]) -> Finding | None:
        for rank in ranks:
            try:
                os.kill(rank.process, signal.SIGUSR2)
            except ProcessLookupError:
                return None
        time.sleep(0.5)
        stands: list[tuple[int, Place, str]] = []
        for rank in ranks:
            stack = last_stack(self._folder / f"stands-{rank.process}")
            if not stack or not _WAITS.search(stack[0][0].replace(os.sep, "/")):
                return None
            own = next((n for n, (file, _, _) in enumerate(stack) if source.is_user_file(file)), None)
            if own is None:
                return None
            file, line, _ = stack[own]
            stands.append((rank.number, source.place(file, line), stack[own - 1][2] if own else ""))
        return _finding(stands)


def _finding(stands: list[tuple[int, Place, str]]) -> Finding:
    sides = "; ".join(
        f"rank {rank} stands in {name} at {os.path.basename(place.file)}:{place.line}"
        for rank, place, name in stands
    )
    first = stands[0]
    other = next((side for side in stands if side[1] != first[1]), stands[-1])
    return Finding(
        kind="ranks-disagree",
        message=f"Every rank waits and none goes on: {sides}.",
        where=first[1],
        cause=cause_at(other[1], f"rank {other[0]} waits here for what rank {first[0]} never does"),
        fix="All ranks have to make the same collective calls in the same order; a receive needs a send on the other "
        "side, which must not wait for a receive itself.",
        op=first[2],
    )


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
