"""Answers of a model that learned by masked diffusion: all tokens begin masked, and pass by pass the surest are kept.

LLaDA's way (low-confidence remasking), greedy: each pass fills in every masked token, keeps as many of them as the
schedule says, those with the highest probability, and masks the rest again. Deterministic. Never trains, and leaves
the model in the mode it was in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.models.diffusion import mask_token_id
from trimtab.models.picture_features import pictures_remembered
from trimtab.models.sample import AT_ONCE, answering, ends_of, shown
from trimtab.models.two_way import Batch, TwoWay, token_inputs, with_columns
from trimtab.placement import PlacementPlan, move

if TYPE_CHECKING:
    import torch

    from trimtab.config.schema import VisionSettings
    from trimtab.data.picture_collate import PictureCollator
    from trimtab.data.pictures import PictureRow


def unmask(
    model: Any,
    asked: Mapping[str, Any],
    *,
    answer_length: int,
    steps: int,
    mask_id: int,
    ends: Collection[int],
    end_id: int,
) -> list[list[int]]:
    """For each row of `asked`, what stands behind it: up to its first end token, without it.

    `asked` is a batch without answers, padded on either side, where the model is. The tower runs once.
    """
    import torch

    two_way = TwoWay(model)
    batch, start = opened(asked, answer_length, mask_id, end_id)
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    answer = start[:, None] + torch.arange(answer_length, device=ids.device)
    if two_way.asks:
        batch["question_mask"] = torch.arange(ids.shape[1], device=ids.device) < start[:, None]
    columns = torch.arange(int(start.min()), int(answer.max()) + 1, device=ids.device)
    was = model.training
    model.eval()
    try:
        with torch.no_grad(), pictures_remembered(two_way.model):
            for keep in schedule(answer_length, steps):
                logits = model(**two_way.inputs(ids, real, batch, columns)).logits
                places = answer - columns[0] if two_way.keeps else answer
                logits = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).float()
                logits[..., mask_id] = -torch.inf  # an answer has no masked token
                chance, best = logits.softmax(-1).max(-1)
                now = ids.gather(1, answer)
                chance = chance.masked_fill(now != mask_id, -1.0)
                # Stable, so that of two equally sure tokens every device keeps the left one.
                kept = chance.sort(dim=1, descending=True, stable=True).indices[:, :keep]
                now = now.scatter(1, kept, best.gather(1, kept))
                ids = ids.scatter(1, answer, now)
    finally:
        model.train(was)
    given = ids.gather(1, answer).tolist()
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in given]


def schedule(answer_length: int, steps: int) -> list[int]:
    """How many tokens each pass keeps: alike, the first passes one more where it does not come out even."""
    if not 1 <= steps <= answer_length:
        raise ValueError(f"{steps} passes over {answer_length} tokens: each pass keeps one at least")
    each, over = divmod(answer_length, steps)
    return [each + (number < over) for number in range(steps)]


def opened(
    asked: Mapping[str, Any], answer_length: int, mask_id: int, filler: int
) -> tuple[Batch, torch.Tensor]:
    """The batch as training lays it out, padded on the right, with masked answers; and where each of them starts."""
    import torch

    real = asked["attention_mask"].bool()
    order = (~real).long().argsort(dim=1, stable=True)
    left = {name: asked[name].gather(1, order) for name in token_inputs(asked)}
    start = real.long().sum(1)
    left["input_ids"] = left["input_ids"].masked_fill(left["attention_mask"] == 0, filler)
    batch = with_columns({**asked, **left}, int(start.max()) + answer_length - real.shape[1], filler)
    width = int(start.max()) + answer_length
    column = torch.arange(width, device=start.device)
    answer = (column >= start[:, None]) & (column < start[:, None] + answer_length)
    for name in token_inputs(batch):
        value = batch[name][:, :width]
        batch[name] = torch.where(answer, value.gather(1, start[:, None] - 1), value)
    batch["input_ids"] = batch["input_ids"].masked_fill(answer, mask_id)
    return batch, start


def answer_by_unmasking(
    model: Any,
    processor: Any,
    collator: PictureCollator,
    rows: Sequence[PictureRow],
    plan: PlacementPlan,
    settings: VisionSettings,
) -> list[str]:
    """One answer per row, to its last question; `collator` is the PictureCollator of the training."""
    tokenizer = processor.tokenizer
    said: list[list[int]] = []
    with answering(model, plan):
        for batch in shown(
            [rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE)], len(rows)
        ):
            said += unmask(
                model,
                move(collator.asked(batch), plan),
                answer_length=settings.answer_length,
                steps=settings.unmask_steps or settings.answer_length,
                mask_id=mask_token_id(tokenizer, settings.mask_token),
                ends=ends_of(model, tokenizer) | set(collator.end_ids),
                end_id=tokenizer.eos_token_id,
            )
    return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in said]
