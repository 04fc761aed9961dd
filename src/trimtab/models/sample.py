"""Answers of a model: to prompts, for people to read, and to held-out rows, to be counted.

Greedy, so that a difference is the training's doing. Never trains, and leaves the model in the mode it was in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.data import render
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Batch = TypeVar("Batch")

AT_ONCE = 16
"""Prompts that are answered together."""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A user's message as training rendered it: through the chat template, opened as the tokenizer opens a text."""
    ids = render.prompt_ids(tokenizer, [{"role": "user", "content": prompt}])
    opening = render.opening_ids(tokenizer)
    return ids if ids[: len(opening)] == opening else opening + ids


def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    plan: PlacementPlan,
    max_new_tokens: int,
) -> list[str]:
    """One answer per prompt, through the chat template that training uses."""
    asked = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    given = continued(model, tokenizer, asked, plan, max_new_tokens)
    return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in given]


def held_out_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Sequence[int]]],
    plan: PlacementPlan,
    limit: int,
) -> dict[str, int]:
    """How many of the first `limit` rows the model answers exactly as they do, to the end: `{"right": …, "of": …}`.

    Rows are those of `PreparedData.eval`: what stands before a row's last answer is asked.
    """
    pairs = [_asked_and_expected(row) for row in islice(rows, limit)]
    longest = max((len(expected) for _, expected in pairs), default=1)
    given = continued(model, tokenizer, [asked for asked, _ in pairs], plan, longest)
    ends = ends_of(model, tokenizer)
    # By text, the end-of-turn token included: a tokenizer may spell one text in several ways.
    # An answer that does not end is held against as many tokens as the row has: those of a long row are cut.
    same = (
        tokenizer.decode(ids if ids[-1] in ends else ids[: len(expected)]) == tokenizer.decode(expected)
        for (_, expected), ids in zip(pairs, given, strict=True)
    )
    return {"right": sum(same), "of": len(pairs)}


def _asked_and_expected(row: Mapping[str, Sequence[int]]) -> tuple[list[int], list[int]]:
    ids, answered = list(row["input_ids"]), [label != render.IGNORED for label in row["labels"]]
    end = len(ids) - answered[::-1].index(True)
    start = next((place + 1 for place in reversed(range(end)) if not answered[place]), 0)
    if start == 0:
        raise RequestError.of(
            "samples.held_out counts right answers, and a held-out row is trained on from its first token",
            "nothing stands before the answer that the model could be asked",
            "set samples.held_out=0, or give data with questions and data.train_on=answers",
        )
    return ids[:start], ids[start:end]


def continued(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    plan: PlacementPlan,
    max_new_tokens: int,
) -> list[list[int]]:
    """What the model says after each prompt, up to and with its first end-of-turn token."""
    import torch

    pad, ends = tokenizer.pad_token_id, ends_of(model, tokenizer)
    by_length = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    batches = [by_length[first : first + AT_ONCE] for first in range(0, len(prompts), AT_ONCE)]
    said: dict[int, list[int]] = {}
    with answering(model, plan):
        for places in shown(batches, len(prompts)):
            asked = [prompts[place] for place in places]
            width = max(map(len, asked))
            # Padded on the left, so that every answer begins at the same column.
            padded = [[pad] * (width - len(ids)) + ids for ids in asked]
            mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in asked]
            batch = {
                "input_ids": torch.tensor(padded, device=plan.device),
                "attention_mask": torch.tensor(mask, device=plan.device),
            }
            said |= zip(places, greedy(model, batch, pad, ends, max_new_tokens), strict=True)
    return [said[place] for place in range(len(prompts))]


@contextmanager
def answering(model: Any, plan: PlacementPlan) -> Iterator[None]:
    """The model as it answers: in evaluation mode, in the plan's precision, keeping nothing for gradients."""
    import torch

    was_training = model.training
    model.eval()
    autocast = torch.autocast(plan.kind, dtype=plan.torch_dtype, enabled=plan.precision != "fp32")
    try:
        with torch.no_grad(), autocast:
            yield
    finally:
        model.train(was_training)


def shown(batches: Sequence[Batch], count: int) -> Iterable[Batch]:
    """The batches, with a bar that tells how far they are where a person looks on."""
    from rich.console import Console
    from rich.progress import track

    return track(
        batches,
        description=f"answering {count}",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def greedy(
    model: Any, batch: Mapping[str, Any], pad: int | None, ends: set[int], max_new_tokens: int
) -> list[list[int]]:
    """What the model says after each prompt of a batch that is padded on the left, up to and with its first end."""
    out = model.generate(
        **batch,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,  # whatever the model's generation_config.json says
        use_cache=True,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )
    new = out[:, batch["input_ids"].shape[1] :].tolist()
    return [ids[: next((i for i, token in enumerate(ids, 1) if token in ends), len(ids))] for ids in new]


def ends_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer: the model's own, and the tokenizer's."""
    own = model.generation_config.eos_token_id
    return {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
