"""Answers of a model to questions about pictures, through its own `generate`.

Greedy, so that a difference is the training's doing. Never trains, and leaves the model in the mode it was in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.models.sample import AT_ONCE, answering, ends_of, greedy, shown
from trimtab.placement import PlacementPlan, move

if TYPE_CHECKING:
    from trimtab.data.picture_collate import PictureCollator
    from trimtab.data.pictures import PictureRow


def answer_pictures(
    model: Any,
    processor: Any,
    collator: PictureCollator,
    rows: Sequence[PictureRow],
    plan: PlacementPlan,
    max_new_tokens: int,
) -> list[str]:
    """One answer per row, to its last question: what stood there is not shown to the model."""
    tokenizer = processor.tokenizer
    # A model may be taught to end its turn with another token than its own settings know.
    ends = ends_of(model, tokenizer) | set(collator.end_ids)
    batches = [rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE)]
    said: list[list[int]] = []
    with answering(model, plan):
        for batch in shown(batches, len(rows)):
            asked = move(collator.asked(batch), plan)
            said += greedy(model, asked, tokenizer.pad_token_id, ends, max_new_tokens)
    return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in said]
