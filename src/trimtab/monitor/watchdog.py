"""A thread that notices when a run falls silent, and says whether it is slow, waiting or stuck, where, and who is late.

The run calls `beat()` whenever it has got something done. Without a beat for `slow_after` seconds the watchdog says
*slow* when the process (with its children) uses processor time or the GPU is busy, else *waiting*, and where the
training thread is. It says *stuck*, with the stack of every thread (also appended to `stacks.txt`), when nothing was
finished for `start_after` seconds before the end of the first step (a compiler, a download, a big load) or for
`stuck_after` later, and the process is idle with a stack that does not move. It speaks again each time the silence has
doubled, and gets used to steps that are slow by nature: of a busy run it first speaks after twice the longest of its
recent silences, and calls no silence stuck below three times that.

Of several ranks each tells the others by files where it is (board.py), and the first that still can says who is behind
(standstill.py); a rank that waits for another is not at work however busy its GPU is. It ends the run only where
`stop` asks for it. A call that keeps Python's interpreter lock would silence this thread too; for that case
`faulthandler`'s own timer, set again at every look, prints the stacks to stderr, and with `stop` ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.monitor.board import Board
from trimtab.monitor.collectives import in_words, last_collective
from trimtab.monitor.last_words import end_now, way_on
from trimtab.monitor.looks import Look, place_of, seconds_of_others, signature, stacks_of_all_threads
from trimtab.monitor.standstill import judge
from trimtab.monitor.wording import duration

# A step gives about three beats: these are the last few steps, and the first, slow one is soon forgotten.
_RECENT_BEATS = 12
# Of a run whose longest recent silence was this part of the present one, the present one is no standstill.
_USUAL_TIMES = 3

_current: Watchdog | None = None


class StuckError(TrimtabError):
    """The run stood still, and `monitor.on_stuck: stop` ended it."""

    comes_again = True


def current() -> Watchdog | None:
    """The watchdog that `trimtab train` started for this process, where it did."""
    return _current


class Watchdog:
    """Watches one process. `say` receives each report; it is called from the watchdog's own thread."""

    def __init__(
        self,
        slow_after: float,
        stuck_after: float,
        say: Callable[[str], None],
        stacks_path: Path,
        *,
        gpu_busy: Callable[[], float | None] = lambda: None,
        processes: int = 1,
        start_after: float | None = None,
        board: Board | None = None,
        stop: bool = False,
    ) -> None:
        """`gpu_busy` gives the GPU's share of busy time or None; `processes` is how many the run has.

        `start_after` stands for `stuck_after` until `settled()`; `board` is where ranks tell each other.
        """
        self.slow_after = slow_after
        self.stuck_after = stuck_after
        self.start_after = start_after or stuck_after
        self.stacks_path = stacks_path
        self.say = say
        self.gpu_busy = gpu_busy
        self.step: int | None = None
        """The last whole step."""
        self.planned_steps: int | None = None
        self.board = board
        self.may_write: Callable[[], bool] = lambda: True
        """Whether the run's folder is the run's by now."""
        self._stop_run = stop
        self._processes = processes
        self._starting = start_after is not None
        self._look_every = min(5.0, slow_after / 4, stuck_after / 4, self.start_after / 4)
        self._stderr = _real_stderr()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._silences: deque[float] = deque(maxlen=_RECENT_BEATS)
        self._asked: object = None
        self._kept_for: object = None
        # Time, what was going on and in which thread, replaced as a whole so that it is read whole.
        self._last_beat = (time.monotonic(), "the run", threading.get_ident())

    @property
    def running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        if self._thread is not None:
            return
        self._last_beat = (time.monotonic(), "the run", threading.get_ident())
        self._silences.clear()
        self._stop.clear()
        self._set_timer()
        self._thread = threading.Thread(target=self._watch, name="trimtab-watchdog", daemon=True)
        self._thread.start()

    def watch_the_process(self) -> None:
        """Be the one watchdog of this process, from its start-up to its end."""
        global _current
        _current = self
        self.start()

    def beat(self, doing: str) -> None:
        """Something got done; `doing` names what comes next (`step 12`, `evaluation`)."""
        now = time.monotonic()
        self._silences.append(now - self._last_beat[0])
        self._last_beat = (now, doing, threading.get_ident())

    def settled(self, settled: bool = True) -> None:
        """The first step is over, and the short time counts; or something of unknown length begins again."""
        if settled and self._starting:
            self._silences.clear()  # those of the start-up tell nothing of the pace
        self._starting = not settled

    def stop(self) -> None:
        global _current
        if _current is self:
            _current = None
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if self._stderr is not None:
            faulthandler.cancel_dump_traceback_later()

    @property
    def limit(self) -> float:
        """How long a silence may last before it is looked at as a standstill."""
        if self._starting:
            return self.start_after
        return max(self.stuck_after, _USUAL_TIMES * max(self._silences, default=0.0))

    def _watch(self) -> None:
        beat = self._last_beat
        mark = (beat[0], seconds_of_others())
        usual, next_report = self._expected()
        stuck_said = False
        seen: object = None
        looks = moved = 0
        last_look = time.monotonic()
        while not self._stop.wait(self._look_every):
            self._set_timer()
            now = time.monotonic()
            if now - last_look > 3 * self._look_every + 2.0:
                # This process itself was stopped, or the machine slept: nobody could get anything done meanwhile.
                self._last_beat = (self._last_beat[0] + now - last_look, *self._last_beat[1:])
            last_look = now
            if self._last_beat is not beat:
                beat = self._last_beat
                usual, next_report = self._expected()
                stuck_said = False
                mark = (0.0, 0.0)
                looks = moved = 0
            silence = now - beat[0]
            if self._board_asks():
                self._tell(silence, beat, Look(1.0, None, True) if silence < next_report / 2 else None)
            if silence < next_report / 2:
                continue
            at = signature(beat[2])
            looks, moved, seen = looks + 1, moved + (seen is not None and at != seen), at
            if self.board is not None and self._processes > 1:
                self._asked = self.board.ask()
            if mark[0] < beat[0]:
                # Processor use is judged over the later half of a silence: what ran before it fell idle is past.
                mark = (now, seconds_of_others())
                looks = moved = 0
                continue
            used = seconds_of_others()
            cores = (used - mark[1]) / max(now - mark[0], 1e-6)
            look = Look(cores, self.gpu_busy(), 2 * moved > looks)
            self._tell(silence, beat, look)
            if silence < next_report or now - mark[0] < min(next_report / 4, 60.0):
                continue
            mark, looks, moved = (now, used), 0, 0
            waits = self._waits(silence)
            if silence < usual and not look.idle and not waits:
                next_report = usual
                continue
            self._report(silence, look, beat, stuck_said, waits)
            stuck_said = stuck_said or (silence >= self.limit and (look.idle or waits is not None))
            next_report = silence * 2
            if silence < self.limit and next_report > self.limit / 2:
                next_report = self.limit

    def _set_timer(self) -> None:
        """Unless set again in time, faulthandler prints the stacks, with or without the interpreter lock."""
        if self._stderr is None:
            return
        if self._stop_run:
            # Later than this thread would, which alone can say who is behind and leave the reason in the folder.
            faulthandler.dump_traceback_later(2 * self.limit + 30.0, file=self._stderr, exit=True)
        else:
            faulthandler.dump_traceback_later(self.limit + self._look_every, file=self._stderr)

    def _expected(self) -> tuple[float, float]:
        """The silence that is usual in this run, and the one to look into."""
        usual = 2 * max(self._silences, default=0.0)
        return usual, min(max(self.slow_after, usual), self.limit)

    def _board_asks(self) -> bool:
        """Whether another rank wants to know where this one is; and end with the others where they end."""
        if self.board is None or self._processes == 1:
            return False
        verdict = self.board.verdict()
        if verdict is not None and verdict[0] != self.board.rank:
            self._keep_stacks("the run is ended, for it stands still")
            end_now(StuckError(verdict[1]), say="")
        asked = self.board.asked()
        new = asked is not None and asked != self._asked
        self._asked = asked
        return new

    def _tell(self, silence: float, beat: tuple[float, str, int], look: Look | None) -> None:
        if self.board is None or self._processes == 1:
            return
        self.board.tell(
            state="silent",
            step=self.step,
            doing=beat[1],
            silence=silence,
            place=place_of(beat[2]),
            idle=look is not None and look.idle and not look.moves,
            collective=last_collective(),
        )

    def _waits(self, silence: float) -> dict[str, Any] | None:
        """The exchange with other ranks that this one has waited in for most of the silence."""
        collective = last_collective() if self._processes > 1 else None
        waits = collective is not None and collective["waits"] and collective["seconds"] > silence / 2
        return collective if waits else None

    def _report(
        self,
        silence: float,
        look: Look,
        beat: tuple[float, str, int],
        stuck_said: bool,
        waits: dict[str, Any] | None,
    ) -> None:
        said = f"nothing finished for {duration(silence)} ({beat[1]}; {look}); now in {place_of(beat[2])}"
        if waits is not None:
            said += f", waiting in {in_words(waits)}"
        at_rest = look.idle or waits is not None
        if silence < self.limit:
            self.say(f"{'waiting' if at_rest else 'slow'}: {said}")
            return
        stacks = self._keep_stacks(said)
        kept = f"every stack is in {self.stacks_path}" if self.may_write() else "its stacks:\n" + stacks
        stuck = at_rest and (waits is not None or not look.moves)
        if self._processes > 1:
            standstill, speaks = self._standstill()
            if standstill is not None:
                if not speaks:
                    return
                stuck, kept = standstill.stuck, f"{kept}, those of the others beside it"
                said = f"nothing finished for {duration(silence)} ({beat[1]}); {standstill.text}"
            else:
                kept += f"\n  one of {self._processes} processes: the one whose stack differs keeps the others waiting"
        if not stuck:
            moves = "; its stack moves" if look.idle and look.moves else ""
            self.say(f"slow: {said}{moves}; {kept}")
        elif self._stop_run:
            self._end(said, kept)
        elif stuck_said:
            self.say(f"stuck: still {said}; {kept}")
        else:
            alone = "the run is left alone (monitor.on_stuck: warn)"
            shown = f"\n{stacks}" if self._processes == 1 and self.may_write() else ""
            self.say(f"stuck: {said}; {alone}; {kept}{shown}")

    def _standstill(self) -> tuple[Any, bool]:
        """How all ranks stand, and whether this one speaks for them: the first that still can."""
        if self.board is None or not self.board.folder.is_dir():
            return None, True
        fresh = 4 * self._look_every + 5.0
        # Those that can answer do so within two looks of their own.
        self._asked = self.board.ask()
        if self._stop.wait(2.5 * self._look_every):
            return None, True
        reports = self.board.read()
        now = time.time()
        able = [r for r, report in reports.items() if report.state != "failed" and now - report.at <= fresh]
        return judge(reports, self._processes, fresh, now), min(
            able, default=self.board.rank
        ) == self.board.rank

    def _end(self, said: str, kept: str) -> None:
        """End the run in all its processes: what is told is told before anything is ended."""
        error = StuckError(
            f"the run is stuck: {said}\n"
            f"  why: nothing gets on any more, and monitor.on_stuck=stop ends such a run; {kept}\n"
            f"  change: {way_on()}"
        )
        end_now(error, before_exit=lambda: self._end_the_others(str(error)))

    def _end_the_others(self, text: str) -> None:
        """The other ranks end when they read the verdict; on this machine those that cannot any more are killed."""
        if self.board is None or self._processes == 1:
            return
        self.board.give_verdict(text)
        until = time.monotonic() + 3 * self._look_every + 5.0
        others = [
            r.process for r in self.board.read().values() if r.rank != self.board.rank and r.process.here
        ]
        while (left := [p for p in others if p.standing() != "gone"]) and time.monotonic() < until:
            if all(process.standing() == "stopped" for process in left):
                break
            time.sleep(0.2)
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))

    def _keep_stacks(self, said: str) -> str:
        stacks = stacks_of_all_threads()
        collective = last_collective() if self._processes > 1 else None
        if collective is not None:
            state = "waits in" if collective["waits"] else "has ended"
            said += f"\n  its last exchange with the other ranks: {state} {in_words(collective)}"
        step = f" after step {self.step}" if self.step is not None else ""
        if not self.may_write():
            return stacks
        # A disk that is full is no reason to stop watching: the report itself is still said.
        with contextlib.suppress(OSError):
            self.stacks_path.parent.mkdir(parents=True, exist_ok=True)
            with self.stacks_path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}{step} {said}\n{stacks}\n")
        return stacks


def _real_stderr() -> int | None:
    """The file descriptor of stderr, where there is one."""
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ is not None else None
    except (OSError, ValueError):
        return None
