"""Measures a model on a task: candidates by their scores, free answers by greedy generation, metrics on the CPU.

It never trains and leaves the model in the mode in which it found it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trimtab.data.tasks import Question, Task, metrics
from trimtab.data.tasks.task import AnyRow
from trimtab.placement import PlacementPlan
from trimtab.zeroth.batches import Collate
from trimtab.zeroth.objective import Example, candidate_scores
from trimtab.zeroth.tokens import encode_example, starts_with

ANSWER_TOKENS = 50
"""Longest free answer, as in MeZO's set-up."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Layout:
    """How questions become batches."""

    tokenizer: Any
    batch_size: int
    """Rows in one forward pass; an example of several long candidates takes several rows."""
    max_length: int

    @cached_property
    def collate(self) -> Collate:
        # Padding is always masked, so any id serves where the tokenizer has none.
        pad_id = self.tokenizer.pad_token_id
        return Collate(pad_id if pad_id is not None else 0, self.max_length, starts_with(self.tokenizer))

    def encode(self, question: Question) -> Example:
        return encode_example(
            self.tokenizer, question.prompt, question.options, question.gold, question.where
        )

    def too_long(self, examples: Sequence[Example]) -> int:
        """How many prompts lose their left end."""
        return sum(len(e.prompt) + max(map(len, e.candidates)) > self.max_length for e in examples)


def evaluate(
    model: Any,
    task: Task,
    splits: Mapping[str, Sequence[Question]],
    layout: Layout,
    plan: PlacementPlan | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """The task's metrics, on a scale to 1; those of a second split carry its name (`accuracy_mismatched`).

    Without a plan the model is taken as it is: on its own device, in its own precision.
    """
    figures: dict[str, float] = {}
    total, done = sum(map(len, splits.values())), 0
    with evaluating(model, plan):
        for split, questions in splits.items():
            before = done

            def tell(count: int, before: int = before) -> None:
                progress(before + count, total)

            ending = split.removeprefix("validation")
            found = _measure(model, task, questions, layout, tell)
            figures |= {name + ending: value for name, value in found.items()}
            done += len(questions)
    return figures


def evaluate_rows(
    model: Any,
    tokenizer: Any,
    task: Task,
    rows: Sequence[AnyRow],
    *,
    device: str | None = None,
    batch_size: int = 16,
    max_length: int = 1024,
) -> dict[str, float]:
    """Anybody's own model on rows of a task: on `device` if that is given, else where the model is."""
    if device is not None:
        model = model.to(device)
    questions = [task.question(row) for row in rows]
    return evaluate(model, task, {"validation": questions}, Layout(tokenizer, batch_size, max_length))


@contextmanager
def evaluating(model: Any, plan: PlacementPlan | None) -> Iterator[None]:
    """Evaluation mode and the plan's precision, without gradients; the model's own mode comes back."""
    precision = (
        torch.autocast(plan.kind, dtype=plan.torch_dtype, enabled=plan.precision != "fp32")
        if plan is not None
        else nullcontext()
    )
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), precision:
            yield
    finally:
        model.train(training)


def _measure(
    model: Any, task: Task, questions: Sequence[Question], layout: Layout, tell: Callable[[int], None]
) -> dict[str, float]:
    references = [q.references for q in questions]
    if task.kind == "answer":
        f1, em = metrics.answer_scores(free_answers(model, questions, layout, tell), references)
        return {"f1": f1, "em": em}
    scores = option_scores(model, laid_out(task, questions, layout), layout, tell)
    if task.regression:
        expected = [_expected(row) for row in scores]
        truth = [q.value for q in questions if q.value is not None]
        return {
            "pearson": metrics.pearson(expected, truth),
            "spearman": metrics.spearman(expected, truth),
        }
    chosen = [max(range(len(row)), key=row.__getitem__) for row in scores]
    gold = [q.gold for q in questions]
    if task.name == "multirc":
        f1a, em = metrics.multirc(chosen, gold, [q.group for q in questions])
        return {"f1a": f1a, "em": em}
    if task.accepted is not None:
        words = [q.options[c].strip() for q, c in zip(questions, chosen, strict=True)]
        f1, em = metrics.answer_scores(words, references)
        return {"f1": f1, "em": em}
    return {name: metrics.BY_LABEL[name](chosen, gold) for name in task.metrics}


def option_scores(
    model: Any, examples: Sequence[Example], layout: Layout, tell: Callable[[int], None] = lambda done: None
) -> list[list[float]]:
    """Mean log-probability of each candidate of each example, in the order given."""
    result: list[list[float]] = [[] for _ in examples]
    done = 0
    for places in _by_length(examples, layout.batch_size):
        batch = layout.collate([examples[p] for p in places])
        scores = candidate_scores(model, batch)[0].cpu()
        if not bool(torch.isfinite(scores[batch.length > 0]).all()):
            raise FloatingPointError(
                "the model's scores are not finite: its weights or its precision are broken"
            )
        for place, row in zip(places, scores.tolist(), strict=True):
            result[place] = row[: len(examples[place].candidates)]
        done += len(places)
        tell(done)
    return result


def laid_out(task: Task, questions: Sequence[Question], layout: Layout) -> list[Example]:
    """Questions as evaluation puts them to the model."""
    return _with_room(questions, layout) if task.kind == "answer" else [layout.encode(q) for q in questions]


def _with_room(questions: Sequence[Question], layout: Layout) -> list[Example]:
    """The answer's room is kept free by a candidate of that length that is never looked at."""
    room = [0] * min(ANSWER_TOKENS, layout.max_length // 2)
    return [Example(layout.encode(q).prompt, [room], 0) for q in questions]


def free_answers(
    model: Any, questions: Sequence[Question], layout: Layout, tell: Callable[[int], None] = lambda done: None
) -> list[str]:
    """What the model writes after each prompt, greedily, up to the end of the line."""
    tokenizer = layout.tokenizer
    ends = [*tokenizer("\n", add_special_tokens=False)["input_ids"][-1:], tokenizer.eos_token_id]
    result = [""] * len(questions)
    examples = _with_room(questions, layout)
    device = model.get_input_embeddings().weight.device
    done = 0
    for places in _by_length(examples, layout.batch_size):
        room = len(examples[places[0]].candidates[0])
        batch = layout.collate([examples[p] for p in places])
        ids = batch.input_ids[:, : batch.input_ids.shape[1] - room + 1].to(device)
        mask = batch.attention_mask[:, : ids.shape[1]].to(device)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=room,
            do_sample=False,
            use_cache=True,
            eos_token_id=[end for end in ends if end is not None],
            pad_token_id=layout.collate.pad_id,
        )
        for place, new in zip(places, out[:, ids.shape[1] :].cpu(), strict=True):
            text = str(tokenizer.decode(new, skip_special_tokens=True))
            result[place] = text.lstrip().split("\n")[0].strip()
        done += len(places)
        tell(done)
    return result


def _expected(scores: Sequence[float]) -> float:
    """The mean of 0, 1, 2, … weighted by the candidates' probabilities."""
    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
    return float(weights @ torch.arange(len(scores), dtype=torch.float64))


def _by_length(examples: Sequence[Example], rows: int) -> Iterator[list[int]]:
    """Places of examples of like length, as many as fill `rows` rows: less padding, and the same result."""
    order = sorted(range(len(examples)), key=lambda p: len(examples[p].prompt))
    group: list[int] = []
    filled = 0
    for place in order:
        example = examples[place]
        needed = 1 if max(map(len, example.candidates)) == 1 else len(example.candidates)
        if group and filled + needed > rows:
            yield group
            group, filled = [], 0
        group.append(place)
        filled += needed
    if group:
        yield group
