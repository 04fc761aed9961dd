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

from trimtab.data.tasks import Question, Task
from trimtab.data.tasks.metrics import answer_scores
from trimtab.data.tasks.task import questions_of
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan
from trimtab.recipes import scored_eval
from trimtab.zeroth import lanes
from trimtab.zeroth.batches import Collate, by_length
from trimtab.zeroth.objective import Example
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


def evaluate(
    model: Any,
    task: Task | None,
    splits: Mapping[str, Sequence[Question]],
    layout: Layout,
    plan: PlacementPlan | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """The task's metrics, on a scale to 1; those of a second split carry its name (`accuracy_mismatched`).

    Without a plan the model is taken as it is: on its own device, in its own precision. Without a task the figures are
    loss and accuracy.
    """
    figures: dict[str, float] = {}
    with evaluating(model, plan):
        for split, questions in splits.items():
            found = _measure(model, task, questions, layout, progress)
            ending = split.removeprefix("validation")
            figures |= {name + ending: value for name, value in found.items()}
    return figures


def evaluate_rows(
    model: Any,
    tokenizer: Any,
    task: Task | None,
    rows: Any,
    *,
    device: str | None = None,
    batch_size: int = 16,
    max_length: int = 1024,
) -> dict[str, float]:
    """Anybody's own model on rows of a task: on `device` if that is given, else where the model is.

    Rows come as a list, as columns or alone, each in text, token lists or token tensors: see `Task.question`. Without a
    task each row brings its own candidates and label.
    """
    if device is not None:
        model = model.to(device)
    questions = questions_of(rows, task, "the rows")
    return evaluate(model, task, {"validation": questions}, Layout(tokenizer, batch_size, max_length))


@contextmanager
def evaluating(model: Any, plan: PlacementPlan | None) -> Iterator[None]:
    """Evaluation mode and the plan's precision, without gradients; each module's own mode comes back."""
    precision = (
        torch.autocast(plan.kind, dtype=plan.torch_dtype, enabled=plan.precision != "fp32")
        if plan is not None
        else nullcontext()
    )
    with lanes.evaluating(model), torch.inference_mode(), precision:
        yield


def _measure(
    model: Any, task: Task | None, questions: Sequence[Question], layout: Layout, tell: Progress
) -> dict[str, float]:
    if task is not None and task.kind == "answer":
        references = [q.references for q in questions]
        f1, em = answer_scores(free_answers(model, questions, layout, tell), references)
        return {"f1": f1, "em": em}
    examples = [layout.encode(q) for q in questions]
    judged = scored_eval.evaluate(model, examples, layout.collate, layout.batch_size, tell, by_rows=True)
    found = scored_eval.measures(judged, questions, task)
    if task is None:
        return found
    if not found.keys() >= set(task.metrics):
        raise RequestError.of(
            f"{questions[0].where}: the answer alone, without others to choose from",
            f"{task.name} is measured by {', '.join(task.metrics)}, which need a choice",
            "give the rows with the task's own columns, or with candidates and a label",
        )
    return {name: found[name] for name in task.metrics}


def laid_out(task: Task, questions: Sequence[Question], layout: Layout) -> list[Example]:
    """Questions as evaluation puts them to the model."""
    return _with_room(questions, layout) if task.kind == "answer" else [layout.encode(q) for q in questions]


def _with_room(questions: Sequence[Question], layout: Layout) -> list[Example]:
    """The answer's room is kept free by a candidate of that length that is never looked at."""
    room = [0] * min(ANSWER_TOKENS, layout.max_length // 2)
    return [Example(layout.encode(q).prompt, [room], 0) for q in questions]


def free_answers(
    model: Any,
    questions: Sequence[Question],
    layout: Layout,
    tell: Progress = lambda done, total: None,
) -> list[str]:
    """What the model writes after each prompt, greedily, up to the end of the line."""
    tokenizer = layout.tokenizer
    ends = [*tokenizer("\n", add_special_tokens=False)["input_ids"][-1:], tokenizer.eos_token_id]
    result = [""] * len(questions)
    examples = _with_room(questions, layout)
    device = model.get_input_embeddings().weight.device
    groups = by_length(examples, layout.batch_size)
    for done, places in enumerate(groups, 1):
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
        tell(done, len(groups))
    return result
