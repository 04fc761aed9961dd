"""Measures a model on questions with given answers: held-out loss, accuracy, and a task's own metrics.

Several processes share the questions and exchange what they found; each then has the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trimtab.data.tasks import Question, Task
from trimtab.data.tasks.metrics import BY_LABEL, answer_scores, multirc, pearson, spearman
from trimtab.zeroth.batches import Collate, by_length
from trimtab.zeroth.objective import Example, candidate_scores, example_losses
from trimtab.zeroth.peers import on_several_ranks, together


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
) -> list[Judged]:
    """Every example judged, in order. `tell` hears how many batches are done."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if on_several_ranks() else (0, 1)
    own = by_length(examples, batch_size)[rank::processes]
    found: list[Judged] = []
    with together("evaluating"):
        for done, places in enumerate(own, 1):
            batch = collate([examples[place] for place in places])
            with torch.no_grad():
                scores = candidate_scores(model, batch)
                losses = example_losses(scores, batch.label)[0].tolist()
                choices = scores[0].argmax(-1).tolist()
                chances = torch.softmax(scores[0], -1).cpu()
                expected = (chances * torch.arange(chances.shape[-1])).sum(-1).tolist()
            found += map(Judged, places, losses, choices, expected)
            tell(done, len(own))
    if processes > 1:
        shared: list[list[Judged]] = [[] for _ in range(processes)]
        dist.all_gather_object(shared, found)
        found = [judged for part in shared for judged in part]
    return sorted(found)


def measures(judged: Sequence[Judged], questions: Sequence[Question], task: Task | None) -> dict[str, float]:
    """Mean loss, accuracy where one choice is right, and the task's metrics that a choice decides.

    What has to be measured on text that the model writes (SQuAD) is for `trimtab bench glue`.
    """
    found = {"loss": math.fsum(j.loss for j in judged) / len(judged)}
    if all(len(question.options) == 1 for question in questions):
        return found
    choices, gold = [j.choice for j in judged], [q.gold for q in questions]
    if task is not None and task.accepted is not None:
        # Several candidates can be right (ReCoRD), so the place of one of them measures nothing.
        words = [q.options[choice].strip() for q, choice in zip(questions, choices, strict=True)]
        f1, em = answer_scores(words, [q.references for q in questions])
        return found | {"f1": f1, "em": em}
    found["accuracy"] = BY_LABEL["accuracy"](choices, gold)
    if task is None:
        return found
    if task.regression:
        values = [float(q.value if q.value is not None else q.gold) for q in questions]
        expected = [j.expected for j in judged]
        own: dict[str, float] = {"pearson": pearson(expected, values), "spearman": spearman(expected, values)}
    elif task.grouped_by is not None:
        own = dict(zip(("f1a", "em"), multirc(choices, gold, [q.group for q in questions]), strict=True))
    else:
        by_label = task.metrics if task.kind == "classification" else ()
        own = {name: BY_LABEL[name](choices, gold) for name in by_label if name in BY_LABEL}
    return found | own
