"""From choices to figures: what each kind of task is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from trimtab.data.tasks import Question, task
from trimtab.recipes.scored_eval import Judged, measures


def judged(*choices: int, loss: Sequence[float] = (), expected: Sequence[float] = ()) -> list[Judged]:
    return [
        Judged(
            place, (loss or [1.0] * len(choices))[place], choice, (expected or [0.0] * len(choices))[place]
        )
        for place, choice in enumerate(choices)
    ]


def question(gold: int, options: Sequence[str] = (" no", " yes"), **more: Any) -> Question:
    return Question("prompt", list(options), gold, "a row", **more)


def test_the_loss_is_the_mean_and_accuracy_counts_the_right_choices() -> None:
    found = measures(judged(1, 0, 1, 1, loss=(1, 2, 3, 6)), [question(g) for g in (1, 0, 0, 1)], None)
    assert found == {"loss": 3.0, "accuracy": 0.75}
    assert measures(judged(0, 0, loss=(1, 2)), [question(0, [" x"])] * 2, None) == {"loss": 1.5}


def test_every_accepted_entity_of_record_is_right() -> None:
    """Its gold position is that of the first one, which training uses."""
    row = {
        "passage": "Ann Lee, called Ann, met Bo.",
        "query": "@placeholder smiled.",
        "entities": ["Ann Lee", "Bo", "Ann"],
        "answers": ["Ann Lee", "Ann"],
    }
    record = task("record")
    questions = [record.question(row)] * 4
    assert questions[0].gold == 0
    found = measures(judged(0, 2, 1, 2), questions, record)
    assert found == {"loss": 1.0, "f1": 0.75, "em": 0.75}


def test_answers_of_one_question_of_multirc_are_judged_together() -> None:
    questions = [question(1, group="a"), question(0, group="a"), question(1, group="b")]
    found = measures(judged(1, 1, 1), questions, task("multirc"))
    assert found["em"] == 0.5
    assert found["f1a"] == pytest.approx(0.8)


def test_a_regression_is_measured_by_its_expected_values() -> None:
    questions = [question(g, [str(n) for n in range(6)], value=v) for g, v in ((0, 0.2), (3, 2.8), (5, 5.0))]
    found = measures(judged(0, 3, 4, expected=(0.5, 3.0, 4.5)), questions, task("stsb"))
    assert found["spearman"] == pytest.approx(1.0)
    assert 0.9 < found["pearson"] < 1.0
