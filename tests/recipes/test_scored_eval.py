"""From choices to figures: what each kind of task is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trimtab.data.tasks import Question, task
from trimtab.data.tasks.load import load_task
from trimtab.errors import RequestError
from trimtab.recipes.scored_eval import Judged, judge, measures
from trimtab.zeroth.objective import Example, build_batch
from trimtab.zeroth.optimizer import NotFinite


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


def test_stsb_is_the_expected_value_of_the_scores() -> None:
    one = task("stsb")
    rows = load_task(one, "sample").splits["validation"]
    questions = [one.question(row) for row in rows]
    # All probability on the two neighbours of the truth, as near as each is: the expected value is the truth.
    chances = torch.zeros(1, len(rows), 6)
    for number, row in enumerate(rows):
        truth = float(row.values["label"])
        low = min(4, int(truth))
        chances[0, number, low], chances[0, number, low + 1] = 1 - (truth - low), truth - low
    scores = chances.clamp(min=1e-30).log()
    batch = build_batch([Example([1], [[n] for n in range(1, 7)], q.gold) for q in questions], 0, 8)
    outcomes = judge(range(len(rows)), scores, batch)
    # In float64: an fp32 softmax would be wrong in the eighth digit.
    wide = scores[0].double().softmax(-1) @ torch.arange(6, dtype=torch.float64)
    assert [j.expected for j in outcomes] == wide.tolist()
    assert [j.expected for j in outcomes] == pytest.approx([q.value for q in questions], abs=1e-6)
    found = measures(outcomes, questions, one)
    assert (found["pearson"], found["spearman"]) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_class_never_stands_in_for_the_true_score() -> None:
    """2.6 and 3.4 are of one class: by the classes there would be no order between them."""
    options = [str(n) for n in range(6)]
    questions = [question(3, options, value=v) for v in (2.6, 3.4)]
    found = measures(judged(3, 3, expected=(2.5, 3.5)), questions, task("stsb"))
    assert found["spearman"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "asked", "lacks"),
    [
        ("stsb", question(3, [str(n) for n in range(6)]), "true score"),
        ("multirc", question(1), "question that it belongs to"),
        ("record", question(0, [" Ann", " Bo"]), "accepted answers"),
        ("sst2", question(-1), "right answer"),
        (None, question(-1), "right answer"),
    ],
)
def test_a_truth_that_is_not_known_is_an_error(name: str | None, asked: Question, lacks: str) -> None:
    with pytest.raises(RequestError, match=f"a row: no {lacks} is known"):
        measures(judged(0), [asked], task(name) if name else None)


def test_answers_compared_by_words_must_be_words() -> None:
    asked = Question([1, 2], [[3], [4]], 0, "a row", references=("Ann",))
    with pytest.raises(RequestError, match="candidates are token ids"):
        measures(judged(0), [asked], task("record"))


def test_scores_that_are_no_numbers_judge_nothing() -> None:
    batch = build_batch([Example([1], [[2], [3]], 0), Example([1], [[2]], 0)], 0, 8)
    scores = torch.tensor([[[-1.0, -2.0], [-1.0, -torch.inf]]])
    assert [j.choice for j in judge([0, 1], scores, batch)] == [0, 0]
    scores[0, 0, 1] = torch.nan
    with pytest.raises(NotFinite, match="not finite numbers"):
        judge([0, 1], scores, batch)
