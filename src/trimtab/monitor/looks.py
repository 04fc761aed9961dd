"""What a process is seen to do from outside of its work: where its threads stand, and the processor time that it used.

The watchdog's eyes. Judges no silence, and stops nothing.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType

import psutil

# Below this share of one core (or of the GPU) the process counts as idle: waiting threads and a redrawn bar stay
# well under it.
IDLE_CORES = 0.05
_FRAMES_LOOKED_INTO = 6


@dataclass(frozen=True)
class Look:
    """What the process was seen to do in the later part of a silence."""

    cores: float
    gpu: float | None
    moves: bool
    """Its stack changed between looks."""

    @property
    def idle(self) -> bool:
        return self.cores < IDLE_CORES and (self.gpu is None or self.gpu < IDLE_CORES)

    def __str__(self) -> str:
        busy = (
            f"{self.cores:.1f} processor cores busy" if self.cores >= IDLE_CORES else "no processor time used"
        )
        return busy + (f", GPU {self.gpu:.0%} busy" if self.gpu is not None else "")


def signature(thread: int) -> object:
    """Where a thread is, with the counters and names that its own (not an installed package's) calls hold.

    A loop over rows that takes its time stands in the same line at every look; what it counts tells that it moves.
    """
    frame = sys._current_frames().get(thread)
    places: list[object] = []
    looked_into = 0
    while frame is not None:
        places.append((id(frame.f_code), frame.f_lasti))
        if looked_into < _FRAMES_LOOKED_INTO and not frame.f_code.co_filename.startswith(_INSTALLED):
            looked_into += 1
            # A copy: in newer Pythons this is a view of what the thread goes on changing.
            held = list(dict(frame.f_locals).items())
            places.append(tuple((k, v) for k, v in held if type(v) in (int, float, str, bool)))
        frame = frame.f_back
    return tuple(places)


def place_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return where(frame) if frame is not None else "a thread that has ended"


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


def seconds_of_others() -> float:
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
