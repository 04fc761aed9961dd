"""What watches over one process of a run from its first moment to its last: the watchdog, the signals, the last words.

It changes nothing about how a run trains, and ends it only as the settings and the user say.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from trimtab.monitor.board import Board
from trimtab.monitor.collectives import record_collectives
from trimtab.monitor.core import watchdog_for
from trimtab.monitor.last_words import on_sudden_end
from trimtab.monitor.watchdog import Watchdog, current
from trimtab.recipes.elastic import forget_failures, refuse_what_came_again
from trimtab.recipes.ranks_ended import ends_as_one_of_several, way_on
from trimtab.recipes.run_folder import failure_kept
from trimtab.recipes.run_mark import Mark
from trimtab.recipes.second_signal import SecondSignal

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.hardware import Launcher
    from trimtab.placement import PlacementPlan
    from trimtab.recipes.run_folder import RunFolder


@contextmanager
def watched(config: Config, plan: PlacementPlan, run: RunFolder, launcher: Launcher) -> Iterator[Watchdog]:
    """Watch over this process while the block runs; of several processes, tell the others how it ends."""
    rank, several = launcher.rank, plan.processes > 1
    if several:
        record_collectives()
    board = Board(run.path, rank, plan.processes) if several or launcher.name == "torchrun" else None

    def say(text: str) -> None:
        print(f"rank {rank}: {text}" if several else text, flush=True)

    watchdog = watchdog_for(config.monitor, run.path, rank, plan.processes, board, say)
    watchdog.may_write = partial(_is_begun, run)
    on_sudden_end(partial(_keep, run, config, plan, rank, watchdog), partial(way_on, run, config))
    try:
        with SecondSignal(say, board if several else None), ends_as_one_of_several(run, board):
            if run.again:
                refuse_what_came_again(run.path)
            watchdog.watch_the_process()
            yield watchdog
    except KeyboardInterrupt as stopped:
        if rank == 0:
            print(f"stopped at once; {way_on(run, config)}", file=sys.stderr, flush=True)
        setattr(stopped, "told", True)  # noqa: B010 - for the door, which else says it
        raise
    finally:
        watchdog.stop()
        on_sudden_end(None)


def open_board(run: RunFolder) -> None:
    """By the main process, once the folder is the run's: from now on the ranks find each other there."""
    watchdog = current()
    if watchdog is not None and watchdog.board is not None:
        watchdog.board.open()
        forget_failures(run.path)


def _is_begun(run: RunFolder) -> bool:
    """Whether the folder is this run's by now: before that nothing is written there."""
    mark = Mark.of(run.path)
    return run.begun or (mark is not None and mark.began and mark.started >= run.opened)


def _keep(
    run: RunFolder,
    config: Config,
    plan: PlacementPlan,
    rank: int,
    watchdog: Watchdog,
    error: BaseException,
) -> None:
    """What `summary.json` tells of a process that is ended from outside its main thread."""
    if watchdog.step is not None:
        run.step, run.planned_steps = watchdog.step, watchdog.planned_steps
    with contextlib.suppress(type(error)), failure_kept(run, config, plan, rank):
        raise error
