"""Answers about pictures: the same in a batch as one at a time, for each family; ended as the rows teach it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from picture_rows import drawn, question, turns
from tiny_processors import FAMILIES, tiny_pair
from trimtab.config.schema import LoraSettings
from trimtab.data.picture_collate import PictureCollator
from trimtab.data.pictures import PictureRow
from trimtab.models.adapters import add_lora
from trimtab.models.families import IMAGE_TEXT
from trimtab.models.sample import AT_ONCE, answering, greedy
from trimtab.models.see import answer_pictures
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
WIDE, SQUARE, TALL = drawn(40, 20), drawn(28, 28, "blue"), drawn(24, 56, "green")


def asked(model_type: str) -> list[PictureRow]:
    rows = [
        question("How many bars are there in this picture?", "two", WIDE),
        question("What?", "a line", SQUARE),
        question("Which colour is the largest of the two shapes?", "green", SQUARE, TALL),
        question("What is three and four?", "seven"),
    ]
    said = (
        ("user", "<image>What?"),
        ("assistant", "a line"),
        ("user", "<image>And now?"),
        ("assistant", "red"),
    )
    return rows if model_type == "paligemma" else [*rows, turns(*said, pictures=(WIDE, TALL))]


def sure(model_type: str) -> tuple[Any, PictureCollator]:
    """A random model with large weights: its choices are far apart, whatever order sums are taken in."""
    model, processor = tiny_pair(model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Not the embeddings: where they are the head as well, a model would repeat the last token for ever.
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(6)
    return model, PictureCollator(processor)


def step_by_step(model: Any, made: PictureCollator, row: PictureRow, count: int) -> list[int]:
    """Token by token, the whole row each time: no batch, no padding, no cache, no `generate`."""
    batch = made.asked([row])
    new: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            new.append(int(model(**batch).logits[0, -1].argmax()))
        if new[-1] in made.end_ids:
            break
        for name in [name for name, value in batch.items() if value.shape == batch["input_ids"].shape]:
            # A new token is no picture, and in PaliGemma none of the prefix.
            kind = {"input_ids": new[-1], "attention_mask": 1}
            value = kind.get(name, int(model.config.model_type == "paligemma"))
            batch[name] = torch.cat([batch[name], torch.tensor([[value]])], dim=1)
    return new


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_batch_is_answered_as_each_row_alone(model_type: str) -> None:
    model, made = sure(model_type)
    rows, tokenizer = asked(model_type), made.processor.tokenizer
    ends, pad = set(made.end_ids), tokenizer.pad_token_id
    with answering(model, PLAN):
        together = greedy(model, made.asked(rows), pad, ends, 6)
        alone = [greedy(model, made.asked([row]), pad, ends, 6)[0] for row in rows]
    assert together == alone
    assert together == [step_by_step(model, made, row, 6) for row in rows]
    assert len({tuple(ids) for ids in together}) > 2, "nearly all are answered alike: the test shows little"
    texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in together]
    assert answer_pictures(model, made.processor, made, rows, PLAN, 6) == texts


def test_a_model_with_adapters_answers_in_the_mode_it_was_in() -> None:
    model, made = sure("qwen3_vl")
    rows = asked("qwen3_vl")
    before = answer_pictures(model, made.processor, made, rows, PLAN, 4)
    adapted = add_lora(model, LoraSettings(r=2), IMAGE_TEXT)
    adapted.train()
    assert answer_pictures(adapted, made.processor, made, rows, PLAN, 4) == before
    assert adapted.training


def test_more_rows_than_one_batch_come_back_in_their_order() -> None:
    model, made = sure("llava")
    rows = (asked("llava") * (AT_ONCE // 4 + 1))[: AT_ONCE + 2]
    given = answer_pictures(model, made.processor, made, rows, PLAN, 3)
    assert given == [given[place % 5] for place in range(len(rows))]


@pytest.mark.parametrize("model_type", ["gemma3", "llava"])
def test_an_answer_stops_where_training_taught_it_to(model_type: str) -> None:
    """Gemma's end of a turn is another token than its EOS; a model tuned on a row repeats it and stops."""
    model, processor = tiny_pair(model_type)
    made, row = PictureCollator(processor), question("What?", "two bars", WIDE)
    batch = made([row])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert answer_pictures(model, processor, made, [row], PLAN, 40) == ["two bars"]
