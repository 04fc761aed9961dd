"""The one evaluator of scored answers: held-out loss, accuracy, and a task's own metrics as officially defined.

Several processes share the questions and exchange what they found; each then has the same figures. A truth that is not
known is an error that names the row, never a guess; text that a model writes (SQuAD) is for `trimtab bench glue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trimtab.data.tasks import Question, Task
from trimtab.data.tasks.metrics import BY_LABEL, answer_scores, multirc, pearson, spearman
from trimtab.errors import RequestError
from trimtab.zeroth.batches import Collate, by_length
from trimtab.zeroth.objective import Example, ScoreBatch, candidate_scores, example_losses
from trimtab.zeroth.optimizer import NotFinite
from trimtab.zeroth.peers import own_rank, together

T = TypeVar("T")


class Judged(NamedTuple):
    """One question's outcome."""

    place: int
    loss: float
    choice: int
    """The candidate of the highest score."""
    expected: float
    """Mean position of the candidates by their probabilities: the figure of a regression task."""


def evaluate(
    model: Any,
    examples: Sequence[Example],
    collate: Collate,
    batch_size: int,
    tell: Callable[[int, int], None] = lambda done, total: None,
    *,
    by_rows: bool = False,
) -> list[Judged]:
    """Every example judged, in order. `tell` hears how many batches are done.

    A batch has `batch_size` examples, or with `by_rows` as many as fill so many rows of a forward.
    """
    rank, processes = own_rank()
    own = by_length(examples, batch_size, by_rows=by_rows)[rank::processes]
    found: list[Judged] = []
    with together("evaluating", found):
        for done, places in enumerate(own, 1):
            batch = collate([examples[place] for place in places])
            with torch.no_grad():
                found += judge(places, candidate_scores(model, batch), batch)
            tell(done, len(own))
    return sorted(found)


def judge(places: Sequence[int], scores: Tensor, batch: ScoreBatch) -> list[Judged]:
    """The outcomes of a batch from its scores, [1, examples, candidates]; what is averaged is so in float64."""
    losses = example_losses(scores, batch.label)[0].tolist()
    table = scores[0].cpu()
    if not bool(torch.isfinite(table[batch.length > 0]).all()):
        raise NotFinite(
            "the scores of an evaluation are not finite numbers\n"
            "  why: the weights are broken, or left the range of their number format; no choice means anything\n"
            "  change: a smaller learning rate, or precision fp32"
        )
    chances = table.double().softmax(-1)
    expected = (chances @ torch.arange(chances.shape[-1], dtype=torch.float64)).tolist()
    return list(map(Judged, places, losses, table.argmax(-1).tolist(), expected))


def measures(judged: Sequence[Judged], questions: Sequence[Question], task: Task | None) -> dict[str, float]:
    """Mean loss, accuracy where one choice is right, and the task's metrics that a choice decides."""
    found = {"loss": math.fsum(j.loss for j in judged) / len(judged)}
    if all(len(question.options) == 1 for question in questions):
        return found
    if task is not None and task.accepted is not None:
        # Several candidates can be right (ReCoRD), so the place of one of them measures nothing.
        words = [_words(q, j.choice) for q, j in zip(questions, judged, strict=True)]
        f1, em = answer_scores(words, [_known(q, q.references, "accepted answers") for q in questions])
        return found | {"f1": f1, "em": em}
    choices = [j.choice for j in judged]
    gold = [_known(q, q.gold if q.gold >= 0 else None, "right answer") for q in questions]
    found["accuracy"] = BY_LABEL["accuracy"](choices, gold)
    if task is None:
        return found
    if task.regression:
        # The score itself, not its class: half of STS-B's scores lie between two classes.
        truths, expected = [_known(q, q.value, "true score") for q in questions], [j.expected for j in judged]
        return found | {"pearson": pearson(expected, truths), "spearman": spearman(expected, truths)}
    if task.grouped_by is not None:
        # F1 over all answers, exact match over questions: a question is right if each of its answers is.
        groups = [_known(q, q.group or None, "question that it belongs to") for q in questions]
        return found | dict(zip(("f1a", "em"), multirc(choices, gold, groups), strict=True))
    return found | {name: BY_LABEL[name](choices, gold) for name in task.metrics if name in BY_LABEL}


def _known(question: Question, truth: T | None, what: str) -> T:
    if truth is None or truth == ():
        raise RequestError.of(
            f"{question.where}: no {what} is known",
            "an answer is measured against the truth, and one that is made up measures nothing",
            "add it to the row, or leave the row out",
        )
    return truth


def _words(question: Question, choice: int) -> str:
    option = question.options[choice]
    if not isinstance(option, str):
        raise RequestError.of(
            f"{question.where}: its candidates are token ids",
            "this task compares answers by their words",
            "give the candidates as text",
        )
    return option.strip()
