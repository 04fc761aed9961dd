"""Speed and time left, on a clock that the test turns."""

from __future__ import annotations

import pytest

from trimtab.monitor.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_the_first_step_is_timed_apart_and_evaluation_counts_only_towards_the_time_left() -> None:
    clock = Clock()
    pace = Pace(0, 12, clock)
    pace.first_begins()
    clock.time += 41
    pace.step_done(1)
    assert pace.first_step_seconds == 41
    assert pace.seconds_a_step is None
    assert pace.left is None

    clock.time += 3
    pace.step_done(2)
    assert (pace.seconds_a_step, pace.left) == (3, 30)

    clock.time += 7  # an evaluation
    assert pace.set_aside() == 7
    clock.time += 3
    pace.step_done(3)
    assert pace.seconds_a_step == 3
    assert pace.left == pytest.approx(13 / 2 * 9)


def test_rates_are_those_since_the_last_log_without_what_was_set_aside() -> None:
    clock = Clock()
    pace = Pace(0, 10, clock)
    clock.time += 10
    pace.step_done(1)
    pace.logged(1000)
    assert (pace.tokens_per_second, pace.steps_per_second) == (100, 0.1)

    clock.time += 50
    pace.set_aside()
    clock.time += 4
    pace.step_done(3)
    pace.logged(3000)
    assert (pace.tokens_per_second, pace.steps_per_second) == (500, 0.5)


def test_tokens_of_the_time_before_a_resume_are_not_counted() -> None:
    clock = Clock()
    pace = Pace(5, 10, clock)
    clock.time += 1
    pace.step_done(6)
    pace.logged(60_000)
    assert pace.tokens_per_second is None
    clock.time += 1
    pace.step_done(7)
    pace.logged(60_100)
    assert pace.tokens_per_second == 100
