"""What a model answers before and after training, for people to read and to count. It trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan

if TYPE_CHECKING:
    from trimtab.recipes.recipe import Job


class Look(NamedTuple):
    """Answers, and how good those are that can be scored."""

    answers: list[str]
    """To what the recipe asks, one each."""
    right: float = 0
    of: int = 0
    """Held-out rows that were answered (`samples.held_out`), and the sum of their scores, at most 1 each."""
    scored: str = "exact match"
    """What the score is called."""


def prompt_answered(
    config: Config, plan: PlacementPlan, model: Any, question: str, pictures: Sequence[Path]
) -> str:
    """To one prompt, through the chat template."""
    from trimtab.models.load import load_tokenizer
    from trimtab.models.sample import answer

    if pictures:
        raise RequestError.of(
            f"{pictures[0]}: a picture, for a run with recipe: {config.recipe}",
            "its model reads text alone",
            "ask without --picture, or train with recipe: vision",
        )
    return answer(model, load_tokenizer(config.model), [question], plan, config.samples.max_new_tokens)[0]


def prompts_answered(job: Job, model: Any) -> Look:
    """To `samples.prompts`."""
    from trimtab.models.sample import answer

    samples = job.config.samples
    return Look(answer(model, job.prepared.processor, samples.prompts, job.plan, samples.max_new_tokens))


def rows_answered(job: Job, model: Any) -> Look:
    """To `samples.prompts`, and to held-out rows, each right where it is the same to the letter."""
    from trimtab.models.sample import held_out_answers

    look = prompts_answered(job, model)
    limit, rows = job.config.samples.held_out, job.prepared.eval
    if not limit or not rows:
        return look
    counted = held_out_answers(model, job.prepared.processor, rows, job.plan, limit)
    return look._replace(right=counted["right"], of=counted["of"])
