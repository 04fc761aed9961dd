"""What one process of a run says when it ends by an error: its own error, or whose end it felt; and the way to go on.

A rank that dies breaks the exchanges of all others, whose errors ("Connection closed by peer") say nothing of the
cause: these are replaced by a sentence that names the rank, its process, its machine and its own error, where they
are known.
"""

from __future__ import annotations

import platform
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.monitor.last_words import tell_launcher
from trimtab.recipes.elastic import note_failure
from trimtab.recipes.second_signal import LostRank

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.monitor.board import Board, RankReport
    from trimtab.recipes.run_folder import RunFolder

_BROKEN = re.compile(
    r"gloo/transport|Connection (closed|reset) by (remote )?peer|Socket (closed|Timeout)|Broken pipe"
    r"|NCCL (communicator was aborted|error|operation .*timed? ?out)|wait timeout after|Application timeout caused pair"
)
# How long a rank that felt another's end waits for that one's own words.
_WORD_SECONDS = 4.0


def way_on(run: RunFolder, config: Config) -> str:
    """How to go on with this run, as far as it has come."""
    del config
    command = f"trimtab train {shlex.quote(str(run.path / 'config.yaml'))} training.resume=true"
    checkpoint = run.newest_checkpoint()
    if checkpoint is not None:
        return f"go on from {checkpoint.name} with `{command}`"
    if run.begun and (run.path / "config.yaml").is_file():
        return f"no checkpoint is saved yet: `{command}` begins it again"
    return "no checkpoint is saved yet: start it again"


@contextmanager
def ends_as_one_of_several(run: RunFolder, board: Board | None) -> Iterator[None]:
    """Tell the other ranks, the next attempt and the launcher why this rank ends, and raise what is the cause."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        said: BaseException = error
        if board is not None and is_felt(error):
            said = _felt(error, board)
        if board is not None:
            board.tell(state="failed", error=f"{type(said).__name__}: {said}", step=_step(run))
            note_failure(run.path, said, board.rank, _step(run))
        interrupted = isinstance(said, KeyboardInterrupt)
        tell_launcher(said, interrupted=interrupted, step=_step(run), host=platform.node())
        if said is error:
            raise
        raise said from error


def _step(run: RunFolder) -> int | None:
    from trimtab.monitor.watchdog import current

    watchdog = current()
    return run.step if watchdog is None or watchdog.step is None else watchdog.step


def is_felt(error: BaseException) -> bool:
    """Whether this is what a rank feels of another's end, rather than a fault of its own."""
    if getattr(error, "felt", False) or type(error).__name__ == "PeerFailed":
        return True
    if isinstance(error, TrimtabError) or not isinstance(error, RuntimeError):
        return False
    return type(error).__name__ in ("DistNetworkError", "DistBackendError") or bool(
        _BROKEN.search(str(error))
    )


def _felt(error: BaseException, board: Board) -> LostRank:
    """The error that names the rank whose end this one felt."""
    until = time.monotonic() + _WORD_SECONDS
    while not (cause := _ended(board)) and time.monotonic() < until:
        time.sleep(0.1)
    own = board.rank
    if cause:
        return LostRank(
            f"rank {own} stops, for {cause}\n  why: a step needs all ranks\n"
            "  change: mend what ended that one; training.resume=true goes on from the last checkpoint"
        )
    others = [report for rank, report in board.read().items() if rank != own and not report.process.here]
    where = "".join(f"; rank {report.rank} is on {report.process.host}" for report in others[:8])
    return LostRank(
        f"rank {own} on {platform.node()} lost the connection to another rank ({_first_line(error)}){where}\n"
        "  why: that one ended, or cannot be reached; a step needs all ranks\n"
        "  change: see the first error in the output of the other ranks"
    )


def _ended(board: Board) -> str:
    """Which other rank has ended by itself, in words; those that only felt another's end do not count."""
    own_words, gone = [], []
    for rank, report in board.read().items():
        if rank == board.rank:
            continue
        if report.state == "failed" and not report.error.startswith((LostRank.__name__, "PeerFailed")):
            own_words.append(f"{_who(report)} failed: {report.error.splitlines()[0]}")
        elif report.state != "failed" and report.process.standing() == "gone":
            gone.append(f"{_who(report)} is gone without a word (killed, or crashed)")
    return "; ".join(own_words or gone)


def _who(report: RankReport) -> str:
    return f"rank {report.rank} (process {report.process.pid} on {report.process.host})"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def checkpoint_in(run_dir: Path) -> str | None:
    """The name of the newest whole checkpoint, for a message and to see whether a run has got on."""
    from trimtab.recipes.run_folder import RunFolder

    newest = RunFolder(run_dir).newest_checkpoint()
    return newest.name if newest is not None else None
