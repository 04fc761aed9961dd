"""Warnings of a run's course: each fault once, and none for healthy runs, however noisy."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from trimtab.monitor.course import Course

HEALTHY = {"learning_rate": 1e-4, "grad_norm": 1.0}


def kinds(rows: list[dict[str, Any]], every: int = 1) -> list[tuple[int, str]]:
    course = Course()
    course.begin(0, set())
    told = [course.logged((number + 1) * every, row) for number, row in enumerate(rows)]
    return [(warned.step, warned.kind) for warnings in told for warned in warnings]


def losses(values: list[float], **more: float) -> list[dict[str, Any]]:
    return [HEALTHY | {"loss": value} | more for value in values]


def test_rewards_that_are_all_equal_are_told_with_the_functions_name() -> None:
    flat = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 1e-4, "reward": 1.0, "reward_std": 0.0}
    flat |= {"frac_reward_zero_std": 1.0, "rewards/judge/mean": 1.0, "rewards/judge/std": 0.0}
    assert kinds([flat] * 20) == [(5, "equal rewards")], "once, and no second word for the zero gradient"
    (warned,) = Course().logged(10, flat)
    assert (
        "reward judge has given all completions of a prompt the same for 10 steps (mean 1)" in warned.text()
    )
    some = flat | {"frac_reward_zero_std": 0.9}
    assert kinds([some, flat, flat, some] * 5) == []


def test_gradients_that_are_zero() -> None:
    assert kinds(losses([2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4], grad_norm=0.0)) == [(5, "zero gradients")]
    assert kinds(losses([2.0] * 4, grad_norm=0.0)) == []
    assert kinds(losses([2.0] * 9, grad_norm=0.0, learning_rate=0.0)) == [], "warm-up begins at zero"


def test_a_loss_that_is_a_constant() -> None:
    assert kinds(losses([0.693147] * 20)) == [(6, "constant loss")]
    assert kinds(losses([0.693147] * 20, learning_rate=0.0)) == []
    assert kinds(losses([0.6931, 0.6932] * 10)) == []


def test_blown_up_weights_are_the_reason() -> None:
    course = Course(lambda: 1e6)
    course.begin(0, set())
    (warned,) = course.logged(6, HEALTHY | {"loss": 5.7, "grad_norm": 0.0})
    assert "training diverged with learning rate 0.0001: the trained weights are 1e+06 times" in warned.why
    assert "training.learning_rate" in warned.change


def test_a_spike_is_told_with_its_factor() -> None:
    rows = losses([2.0 + 0.01 * (n % 7) for n in range(30)] + [9.0] + [2.0] * 5)
    assert kinds(rows) == [(31, "spike")]
    course = Course()
    course.begin(0, set())
    told = [course.logged(n + 1, row) for n, row in enumerate(rows)]
    assert "step 31: the loss is 9, 4.4" in told[30][0].found
    assert kinds(losses([2.0, 9.0, 2.0, 2.1, 2.2])) == [], "nothing is judged in the first steps"


def test_a_loss_that_climbs_above_its_beginning() -> None:
    climbs = [3.0 - 0.1 * n for n in range(10)] + [2.0 + 0.2 * n for n in range(25)]
    assert [kind for _, kind in kinds(losses(climbs))] == ["rising loss"]
    assert [kind for _, kind in kinds(losses([5.0, 80.0, 90.0, 85.0, 95.0]))] == ["rising loss"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_noisy_healthy_runs_are_left_alone(seed: int, tail: str) -> None:
    """Batches of one row, whose losses differ by an order of magnitude, along a falling curve."""
    draw = random.Random(seed)

    def noise() -> float:
        return math.exp(draw.gauss(0, 0.7)) if tail == "heavy" else max(0.2, draw.gauss(1, 0.3))

    values = [(0.3 + 2.5 * math.exp(-n / 40)) * noise() for n in range(300)]
    assert kinds(losses(values)) == []
    overfitted = [2.5 * math.exp(-n / 15) * noise() + 1e-4 for n in range(200)]
    assert kinds(losses(overfitted)) == []


def test_a_held_out_loss_that_rises() -> None:
    def told(values: list[float]) -> list[int]:
        course = Course()
        course.begin(0, set())
        return [w.step for n, value in enumerate(values) for w in course.evaluated(10 * n, value)]

    assert told([3.0, 2.0, 2.2, 2.4, 2.7, 3.0]) == [40]
    assert told([3.0, 2.0, 2.01, 2.0, 2.02, 2.0, 2.03]) == []
    assert told([2.0, 2.001, 2.002, 2.003, 2.004]) == [], "not worth a word"


def test_what_was_said_before_a_resume_is_not_said_again() -> None:
    course = Course()
    course.begin(40, {"constant loss"})
    assert not [w for n in range(41, 60) for w in course.logged(n, HEALTHY | {"loss": 1.0})]
