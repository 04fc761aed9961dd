"""torchrun for `trimtab train` on one machine: starts the ranks, begins again where one died, and has the last word.

    python -m trimtab.recipes.agent PROCESSES RESTARTS FOLDER train …

It is torchrun's own agent, called once for each attempt, so that a request that is wrong, an error that came twice and
a run that was told to end are not tried again. Its own report (a traceback of itself and a table) is not shown: what
ended the run is said in one message, by the rank that failed first.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.monitor.board import FOLDER, verdict_in
from trimtab.monitor.last_words import OWN_AGENT
from trimtab.reading import parse_json
from trimtab.recipes.ranks_ended import checkpoint_in
from trimtab.rehearse.session import VARIABLE as REHEARSED


@dataclass(frozen=True)
class Ended:
    """How the rank ended that ended the run."""

    rank: int
    pid: int
    exit_code: int
    own: Mapping[str, Any]
    """What it left for its launcher; empty for one that was killed."""

    @property
    def asked_wrongly(self) -> bool:
        return bool(self.own.get("exit_code", self.exit_code) == 2)

    @property
    def again(self) -> bool:
        """Whether it may come to another end the next time."""
        ends = self.asked_wrongly or self.own.get("comes_again") or self.own.get("interrupted")
        return not bool(ends)

    def alike(self, other: Ended | None) -> bool:
        """The same error at the same step; of a process that was killed nothing tells the step."""
        if other is None or not self.own:
            return False
        return all(self.own.get(key) == other.own.get(key) for key in ("kind", "text", "step"))

    def words(self) -> str:
        who = f"rank {self.rank} (process {self.pid} on {platform.node()})"
        if self.own.get("kind") == "StuckError":
            return str(self.own["text"])
        if self.own.get("text"):
            step = self.own.get("step")
            at = f" after step {step}" if step is not None else ""
            return f"{who} failed{at}: {self.own['kind']}: {self.own['text']}"
        if self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = f"signal {-self.exit_code}"
            return f"{who} was ended by {name}{_hint(name)}"
        return f"{who} ended with exit code {self.exit_code}"


def _hint(name: str) -> str:
    return {
        "SIGKILL": " (by hand, by the system for want of memory, see `dmesg`, or by a scheduler)",
        "SIGSEGV": " (a crash inside a library)",
        "SIGBUS": " (often: too little shared memory, /dev/shm, or a full disk under a mapped file)",
        "SIGABRT": " (a library gave up: see what it printed above)",
    }.get(name, "")


def first_of(failures: Mapping[int, Any]) -> Ended:
    """The rank whose end is the cause: not one that only felt another's, then the one that ended first."""
    ended = [
        (
            bool(own.get("felt")),
            own.get("at", float(failure.timestamp)),
            Ended(rank, failure.pid, failure.exitcode, own),
        )
        for rank, failure in failures.items()
        for own in [failure.error_file_data.get("trimtab", {})]
    ]
    return min(ended, key=lambda entry: entry[:2])[2]


def main(words: list[str]) -> int:
    """Run to the end; returns the exit code."""
    processes, restarts, folder, *command = words
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # It would print that a process failed, its own traceback and a table; what matters of them is said below.
    logging.disable(logging.ERROR)
    most, attempt, in_a_row = int(restarts), 0, 0
    reached: str | None = None
    before: Ended | None = None
    while True:
        os.environ[OWN_AGENT] = str(attempt)
        began = time.time()
        arguments = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=0", "-m", "trimtab"]
        try:
            run(parse_args([*arguments, *command]))
            return 0
        except SignalException as told:
            return _told_to_end(told, Path(folder))
        except ChildFailedError as error:
            ended = first_of(error.failures)
        verdict = verdict_in(Path(folder) / FOLDER, began)
        if verdict is not None:
            # Who ended first tells nothing then: the ranks that could not end themselves were killed.
            print(f"error: {verdict[1]}", file=sys.stderr, flush=True)
            return 1
        if ended.own.get("interrupted"):
            return 1
        checkpoint = checkpoint_in(Path(folder))
        in_a_row = 1 if checkpoint != reached else in_a_row + 1
        reached = checkpoint
        if not ended.again or ended.alike(before) or in_a_row > most:
            return _last_words(ended, before, Path(folder), most, in_a_row)
        attempt, before = attempt + 1, ended
        on = f"going on from {checkpoint}" if checkpoint else "no checkpoint yet: beginning again"
        print(
            f"{ended.words()}\n{on} (restart {in_a_row} of {most} without a new checkpoint; monitor.restarts)",
            file=sys.stderr,
            flush=True,
        )


def _told_to_end(told: Any, folder: Path) -> int:
    """A run that saved at a whole step has said how to go on; one that could not is told of here."""
    try:
        summary = parse_json((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    if not isinstance(summary, dict):
        summary = {}
    if summary.get("status") != "interrupted" or "error" in summary:
        name = signal.Signals(told.sigval).name
        print(
            f"stopped by {name} before a whole step was saved; {_to_go_on(folder)}",
            file=sys.stderr,
            flush=True,
        )
    return 1


def _to_go_on(folder: Path) -> str:
    checkpoint = checkpoint_in(folder)
    command = f"trimtab train {shlex.quote(str(folder / 'config.yaml'))} training.resume=true"
    return f"to go on from {checkpoint}: {command}" if checkpoint else f"to begin again: {command}"


def _last_words(ended: Ended, before: Ended | None, folder: Path, most: int, in_a_row: int) -> int:
    if ended.asked_wrongly and ended.own.get("text"):
        if REHEARSED not in os.environ:  # a rehearsal ends with this message itself
            print(f"error: {ended.own['text']}", file=sys.stderr, flush=True)
        return 2
    lines = [f"error: {ended.words()}"]
    if ended.alike(before):
        lines.append("  it came twice at the same step, so it is not tried again")
    elif in_a_row > most > 0:
        lines.append(f"  it was begun again {most} times without a new checkpoint (monitor.restarts={most})")
    if "training.resume=true" not in str(ended.own.get("text", "")):
        lines.append(f"  {_to_go_on(folder)}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    return 2 if ended.asked_wrongly else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
