"""A watchdog over a process that really waits, really works, or really keeps the interpreter lock."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trimtab.monitor.looks import processor_seconds
from trimtab.monitor.watchdog import Watchdog

PATIENCE = 60.0


class Ear:
    """Keeps the reports, and sets an event at the first one that holds a word."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.reports: list[str] = []
        self.found = ""
        self.heard = threading.Event()

    def __call__(self, text: str) -> None:
        self.reports.append(text)
        if text.startswith(self.word) and not self.found:
            self.found = text
            self.heard.set()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watchdog]]:
    dogs: list[Watchdog] = []

    def start(ear: Ear, slow: float = 0.2, stuck: float = 0.5, **more: object) -> Watchdog:
        dog = Watchdog(slow, stuck, ear, tmp_path / "run" / "stacks.txt", **more)  # type: ignore[arg-type]
        dogs.append(dog)
        dog.start()
        dog.beat("step 7")
        return dog

    yield start
    for dog in dogs:
        dog.stop()


def wait_for_a_batch_that_never_comes(event: threading.Event) -> bool:
    return event.wait(PATIENCE)


def multiply_until(event: threading.Event, seconds: float = PATIENCE) -> None:
    number, give_up = 1, time.monotonic() + seconds
    while not event.is_set() and time.monotonic() < give_up:
        number = number * 3 % 1_000_003


def test_a_waiting_run_is_called_stuck_with_the_stack_of_every_thread(
    watch: Callable[..., Watchdog], tmp_path: Path
) -> None:
    ear = Ear("stuck")
    helper_may_end = threading.Event()
    helper = threading.Thread(target=helper_may_end.wait, args=(PATIENCE,), name="a-helper")
    helper.start()
    watch(ear)
    assert wait_for_a_batch_that_never_comes(ear.heard), ear.reports
    helper_may_end.set()
    helper.join()

    report = ear.found
    assert "step 7" in report
    assert "no processor time used" in report
    assert "called from wait_for_a_batch_that_never_comes" in report.splitlines()[0]
    kept = (tmp_path / "run" / "stacks.txt").read_text()
    for text in (report, kept):
        assert "in wait_for_a_batch_that_never_comes" in text
        assert "a-helper:" in text
        assert "trimtab-watchdog" not in text
    assert str(tmp_path / "run" / "stacks.txt") in report


def test_a_busy_run_is_called_slow_and_where_never_stuck(watch: Callable[..., Watchdog]) -> None:
    ear = Ear("slow")
    watch(ear, stuck=PATIENCE)
    multiply_until(ear.heard)
    assert ear.heard.is_set()
    assert "multiply_until" in ear.found
    assert "cores busy" in ear.found


def count_rows_slowly(event: threading.Event) -> None:
    rows = 0
    while rows < PATIENCE / 0.02 and not event.wait(0.02):
        rows += 1


def test_an_idle_loop_that_counts_is_slow_not_stuck(watch: Callable[..., Watchdog]) -> None:
    ear = Ear("slow")
    watch(ear, slow=0.4, stuck=0.8)
    count_rows_slowly(ear.heard)
    assert "its stack moves" in ear.found, ear.reports
    assert not any(report.startswith("stuck") for report in ear.reports)


def test_a_busy_run_past_the_stuck_time_keeps_its_stacks_but_is_slow(
    watch: Callable[..., Watchdog], tmp_path: Path
) -> None:
    ear = Ear("slow")
    watch(ear, slow=0.2, stuck=0.2)
    multiply_until(ear.heard)
    assert ear.heard.is_set(), ear.reports
    assert "multiply_until" in (tmp_path / "run" / "stacks.txt").read_text()


def test_a_busy_gpu_is_not_stuck_and_fellow_processes_are_named(watch: Callable[..., Watchdog]) -> None:
    ear = Ear("slow")
    watch(ear, slow=0.2, stuck=0.2, gpu_busy=lambda: 0.97, processes=4)
    assert ear.heard.wait(PATIENCE), ear.reports
    assert "GPU 97% busy" in ear.found
    assert "one of 4 processes" in ear.found


def test_reports_grow_rarer_and_the_stacks_are_shown_once(watch: Callable[..., Watchdog]) -> None:
    ear = Ear("stuck: still")
    watch(ear, slow=0.2, stuck=0.8)
    assert ear.heard.wait(PATIENCE), ear.reports
    stuck = [report for report in ear.reports if report.startswith("stuck")]
    earlier = ear.reports[: ear.reports.index(stuck[0])]
    assert len(earlier) <= 2, "after 0.2 and 0.4 s; the next doubling is the stuck time"
    assert ["File" in report for report in stuck[:2]] == [True, False]


def test_beats_keep_it_quiet_and_so_does_stop(watch: Callable[..., Watchdog]) -> None:
    ear = Ear("never")
    dog = watch(ear, slow=5.0, stuck=10.0)
    for step in range(20):
        dog.beat(f"step {step}")
        ear.heard.wait(0.01)
    dog.stop()
    dog.stop()
    assert not dog.running
    assert ear.reports == []


def test_it_gets_used_to_slow_steps_and_calls_none_of_them_stuck(tmp_path: Path) -> None:
    dog = Watchdog(0.001, 100.0, lambda _: None, tmp_path / "stacks.txt")
    assert dog._expected() == (0.0, 0.001)
    for _ in range(3):
        threading.Event().wait(0.02)
        dog.beat("a slow step")
        dog.beat("its log")
    assert dog._expected()[1] >= 0.04
    dog.stuck_after = 0.03
    assert dog.limit >= 3 * 0.02, "three times the longest of the recent silences"


def test_the_first_step_has_more_time_and_its_length_is_forgotten(tmp_path: Path) -> None:
    dog = Watchdog(1.0, 2.0, lambda _: None, tmp_path / "stacks.txt", start_after=500.0)
    assert dog.limit == 500.0
    dog._silences.append(400.0)  # a compiler at work
    dog.settled()
    assert dog.limit == 2.0
    dog.settled(False)
    assert dog.limit == 500.0


def test_a_busy_run_with_long_steps_is_left_in_peace(watch: Callable[..., Watchdog]) -> None:
    ear = Ear("slow")
    # Busy or idle is judged over a quarter of these, in which a loaded machine must have let the run on.
    dog = watch(ear, slow=0.6, stuck=1.2)
    dog._silences.append(PATIENCE)  # a step of a minute
    dog.beat("step 8")
    multiply_until(ear.heard, seconds=2.5)
    assert ear.reports == []


def test_processor_time_of_children_counts() -> None:
    before = processor_seconds()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert processor_seconds() - before >= 0.25


HOLDS_THE_LOCK = """
import pathlib, re, sys
from trimtab.monitor.watchdog import Watchdog

def backtrack_for_ever():
    for length in range(20, 40):
        re.match("(a+)+$", "a" * length + "b")

Watchdog(0.2, 0.4, print, pathlib.Path(sys.argv[1])).start()
backtrack_for_ever()
"""


def test_a_call_that_keeps_the_interpreter_lock_is_shown_on_stderr(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path / "stacks.txt")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        shown = ""
        for line in process.stderr:
            shown += line
            if "in backtrack_for_ever" in line:
                break
        assert "Timeout" in shown
        assert "in backtrack_for_ever" in shown
        assert process.poll() is None, "the run goes on"
    finally:
        process.kill()
        process.wait()
