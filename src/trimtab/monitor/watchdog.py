"""A thread that notices when a run falls silent, and says whether it is slow, waiting or stuck, and where.

The run calls `beat()` whenever it has got something done. Without a beat for `slow_after` seconds the watchdog says
*slow* when the process (with its children) uses processor time or the GPU is busy, else *waiting*, and where the
training thread is; without a beat for `stuck_after` seconds and idle, it says *stuck*, with the stack of every
thread, and appends them to `stacks.txt`. It speaks again each time the silence has doubled. Where steps are slow
by nature it gets used to it: of a busy run it first speaks after twice the longest of its recent silences.

It never stops, kills or changes the run. A call that keeps Python's interpreter lock would silence this thread too;
for that case `faulthandler`'s own timer, set again at every look, prints the stacks to stderr.
"""

from __future__ import annotations

import faulthandler
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

from trimtab.monitor.wording import duration

# Below this share of one core (or of the GPU) the process counts as idle: waiting threads and a redrawn bar stay
# well under it.
IDLE_CORES = 0.05
# A step gives about three beats: these are the last few steps, and the first, slow one is soon forgotten.
_RECENT_BEATS = 12


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
    ) -> None:
        """`gpu_busy` gives the GPU's share of busy time or None; `processes` is how many the run has."""
        self.slow_after = slow_after
        self.stuck_after = stuck_after
        self.stacks_path = stacks_path
        self._say = say
        self._gpu_busy = gpu_busy
        self._processes = processes
        self._look_every = min(5.0, slow_after / 4, stuck_after / 4)
        self._stderr = _real_stderr()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._silences: deque[float] = deque(maxlen=_RECENT_BEATS)
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

    def beat(self, doing: str) -> None:
        """Something got done; `doing` names what comes next (`step 12`, `evaluation`)."""
        now = time.monotonic()
        self._silences.append(now - self._last_beat[0])
        self._last_beat = (now, doing, threading.get_ident())

    def stop(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if self._stderr is not None:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        beat = self._last_beat
        mark = (beat[0], _seconds_of_others())
        usual, next_report = self._expected()
        stuck_said = False
        while not self._stop.wait(self._look_every):
            self._set_timer()
            now = time.monotonic()
            if self._last_beat is not beat:
                beat = self._last_beat
                usual, next_report = self._expected()
                stuck_said = False
                mark = (0.0, 0.0)
            silence = now - beat[0]
            if silence < next_report / 2:
                continue
            if mark[0] < beat[0]:
                # Processor use is judged over the later half of a silence: what ran before it fell idle is past.
                mark = (now, _seconds_of_others())
                continue
            if silence < next_report or now - mark[0] < next_report / 4:
                continue
            used = _seconds_of_others()
            cores, gpu = (used - mark[1]) / max(now - mark[0], 1e-6), self._gpu_busy()
            mark = (now, used)
            idle = cores < IDLE_CORES and (gpu is None or gpu < IDLE_CORES)
            if silence < usual and not idle:
                next_report = usual
                continue
            activity = (
                f"{cores:.1f} processor cores busy" if cores >= IDLE_CORES else "no processor time used"
            )
            if gpu is not None:
                activity += f", GPU {gpu:.0%} busy"
            self._report(silence, idle, f"{beat[1]}; {activity}", beat[2], stuck_said)
            stuck_said = stuck_said or (idle and silence >= self.stuck_after)
            next_report = silence * 2
            if silence < self.stuck_after and next_report > self.stuck_after / 2:
                next_report = self.stuck_after

    def _set_timer(self) -> None:
        """Unless set again in time, faulthandler prints the stacks, with or without the interpreter lock."""
        if self._stderr is not None:
            faulthandler.dump_traceback_later(self.stuck_after + self._look_every, file=self._stderr)

    def _expected(self) -> tuple[float, float]:
        """The silence that is usual in this run, and the one to look into."""
        usual = 2 * max(self._silences, default=0.0)
        return usual, min(max(self.slow_after, usual), self.stuck_after)

    def _report(self, silence: float, idle: bool, doing: str, thread: int, stuck_said: bool) -> None:
        frame = sys._current_frames().get(thread)
        place = where(frame) if frame is not None else "a thread that has ended"
        said = f"nothing finished for {duration(silence)} ({doing}); now in {place}"
        if silence < self.stuck_after:
            self._say(f"{'waiting' if idle else 'slow'}: {said}")
            return
        stacks = stacks_of_all_threads()
        self._keep(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {said}\n{stacks}")
        kept = f"every stack is in {self.stacks_path}"
        if self._processes > 1:
            kept += f"\n  one of {self._processes} processes: the one whose stack differs keeps the others waiting"
        if not idle:
            self._say(f"slow: {said}; {kept}")
        elif stuck_said:
            self._say(f"stuck: still {said}; {kept}")
        else:
            self._say(f"stuck: {said}; the run is left alone; {kept}\n{stacks}")

    def _keep(self, text: str) -> None:
        self.stacks_path.parent.mkdir(parents=True, exist_ok=True)
        with self.stacks_path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def processor_seconds() -> float:
    """Processor time used so far by this process and its children, dead and living."""
    process = psutil.Process()
    own = process.cpu_times()
    total = time.process_time() + own.children_user + own.children_system
    for child in process.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _seconds_of_others() -> float:
    """Processor time of all but the calling thread: looking on is no sign of life."""
    return processor_seconds() - time.thread_time()


def where(frame: FrameType) -> str:
    """The innermost call, and the nearest one outside the standard library and the installed packages."""
    place = _place(frame)
    current: FrameType | None = frame
    while current is not None:
        if not current.f_code.co_filename.startswith(_INSTALLED):
            return place if current is frame else f"{place}, called from {_place(current)}"
        current = current.f_back
    return place


def stacks_of_all_threads() -> str:
    """Every thread's Python stack but the caller's own, outermost call first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        thread = threads.get(ident)
        name = thread.name if thread is not None else f"thread {ident}, not started by Python"
        parts.append(f"  {name}:\n" + "".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(parts)


_INSTALLED = tuple({"<frozen", *(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib"))})


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _real_stderr() -> int | None:
    """The file descriptor of stderr, where there is one."""
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ is not None else None
    except (OSError, ValueError):
        return None
