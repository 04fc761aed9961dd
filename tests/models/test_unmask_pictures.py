"""Masked diffusion with each family's own processor: rows with one picture, two or none, in one batch as each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from masked_rows import PLAN
from picture_rows import drawn, question
from tiny_processors import FAMILIES, tiny_pair
from trimtab.config.schema import VisionSettings
from trimtab.data.picture_collate import PictureCollator
from trimtab.models.diffusion import MaskedDiffusion, mask_token_id
from trimtab.models.unmask import answer_by_unmasking

WIDE, SQUARE, TALL = drawn(40, 20), drawn(28, 28, "blue"), drawn(24, 56, "green")
ROWS = [
    question("How many bars are there in this picture?", "two", WIDE),
    question("What?", "a line", SQUARE),
    question("Which colour is the largest of the two shapes?", "green", SQUARE, TALL),
    question("What is three and four?", "seven"),
]
MASK = "~"
SETTINGS = VisionSettings(answer_length=6, unmask_steps=3, mask_token=MASK)


def parts(model_type: str) -> tuple[Any, PictureCollator, MaskedDiffusion]:
    model, processor = tiny_pair(model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(6)
    collator = PictureCollator(processor)
    objective = MaskedDiffusion(
        model,
        mask_id=mask_token_id(processor.tokenizer, MASK),
        end_id=processor.tokenizer.eos_token_id,
        seed=0,
        answer_length=12,
        ends=collator.end_ids,
    )
    return model.eval(), collator, objective


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_batch_is_learned_as_each_row_alone(model_type: str) -> None:
    model, collator, objective = parts(model_type)
    collate = objective.ended(collator)
    objective.check(collator(ROWS[:2]), PLAN)
    assert objective.two_way.shares

    @torch.no_grad()
    def loss(rows: list[Any]) -> tuple[float, int]:
        masked = objective.inputs(collate(rows), 0)
        with objective.pictures_once():
            total, trained = objective.loss(model(**masked.inputs).logits, masked.targets, 1)
        return total.item(), int(trained)

    alone = [loss([row]) for row in ROWS]
    together, trained = loss(ROWS)
    assert trained == sum(count for _, count in alone) == int(collate(ROWS)["labels"].ne(-100).sum())
    assert together == pytest.approx(sum(part for part, _ in alone), rel=1e-4)
    objective.two_way.shares = False
    assert loss(ROWS)[0] == pytest.approx(together, rel=1e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_batch_is_answered_as_each_row_alone(model_type: str) -> None:
    model, collator, _ = parts(model_type)

    def said(rows: list[Any]) -> list[str]:
        return answer_by_unmasking(model, collator.processor, collator, rows, PLAN, SETTINGS)

    together = said(ROWS)
    assert together == [said([row])[0] for row in ROWS]
    assert len(set(together)) > 1
    assert all(MASK not in text for text in together)
