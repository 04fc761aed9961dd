"""The sampler of masked diffusion, held against plain loops; and what was learned is what is answered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from masked_rows import END, MASK, PLAN, padded, seeing_model, seen_batch, text_model
from trimtab.config.schema import VisionSettings
from trimtab.models.diffusion import MaskedDiffusion
from trimtab.models.sample import AT_ONCE
from trimtab.models.two_way import TwoWay
from trimtab.models.unmask import answer_by_unmasking, schedule, unmask

QUESTIONS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
LENGTH = 6


def asked(questions: list[list[int]], left: bool = True) -> dict[str, torch.Tensor]:
    width = max(map(len, questions))
    rows = [([0] * (width - len(q)), q) for q in questions]
    return {
        "input_ids": torch.tensor([f + q if left else q + f for f, q in rows]),
        "attention_mask": torch.tensor(
            [[0] * len(f) + [1] * len(q) if left else [1] * len(q) + [0] * len(f) for f, q in rows]
        ),
    }


@torch.no_grad()
def by_loops(model: Any, question: list[int], length: int, steps: int, **seen: Any) -> list[int]:
    """One row, one token at a time, all of the model in every pass."""
    answer = [MASK] * length
    for keep in [length // steps + (1 if n < length % steps else 0) for n in range(steps)]:
        row = question + answer
        more = dict(seen)
        if "mm_token_type_ids" in more:
            more["mm_token_type_ids"] = torch.tensor([[int(token == 100) for token in row]])
        mask = torch.ones(1, len(row), dtype=torch.bool)
        logits = model(**TwoWay(model).inputs(torch.tensor([row]), mask, more)).logits[0]
        sure = []
        for place in range(length):
            if answer[place] == MASK:
                scores = logits[len(question) + place].clone()
                scores[MASK] = -torch.inf
                chances = scores.softmax(-1)
                sure.append((float(chances.max()), -place, int(chances.argmax())))
        for _, place, token in sorted(sure, reverse=True)[:keep]:
            answer[-place] = token
    return answer


def plain(model: Any, batch: dict[str, Any], steps: int, ends: set[int]) -> list[list[int]]:
    return unmask(model, batch, answer_length=LENGTH, steps=steps, mask_id=MASK, ends=ends, end_id=END)


@pytest.fixture(scope="module")
def model() -> Any:
    model = text_model("qwen3")
    with torch.no_grad():  # so that probabilities differ
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize("steps", [1, 2, 4, LENGTH])
@pytest.mark.parametrize("left", [True, False])
def test_the_surest_tokens_are_kept_pass_by_pass(model: Any, steps: int, left: bool) -> None:
    model.train()
    given = plain(model, asked(QUESTIONS, left), steps, set())
    assert given == [by_loops(model.eval(), question, LENGTH, steps) for question in QUESTIONS]
    assert len({tuple(row) for row in given}) == len(QUESTIONS)
    assert all(MASK not in row for row in given)


def test_the_model_stays_in_its_mode(model: Any) -> None:
    for training in (True, False):
        model.train(training)
        plain(model, asked(QUESTIONS), 2, set())
        assert model.training is training


def test_an_answer_stops_before_its_first_end(model: Any) -> None:
    whole = plain(model, asked(QUESTIONS), LENGTH, set())
    end = whole[0][2]
    cut = plain(model, asked(QUESTIONS), LENGTH, {end, 127})
    assert cut[0] == whole[0][: whole[0].index(end)]
    assert [len(row) <= LENGTH for row in cut] == [True] * 3


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "idefics3", "gemma3"])
def test_the_tower_runs_once_for_all_passes(kind: str) -> None:
    model = seeing_model(kind)
    batch = seen_batch(model)
    picture = {n: batch[n] for n in ("pixel_values", "image_grid_thw", "image_sizes") if n in batch}
    questions = [
        [token for token, label, real in zip(*of, strict=True) if label == -100 and real]
        for of in zip(
            batch["input_ids"].tolist(),
            batch["labels"].tolist(),
            batch["attention_mask"].tolist(),
            strict=True,
        )
    ]
    rows: dict[str, Any] = {**asked(questions), **picture}
    if "mm_token_type_ids" in batch:
        rows["mm_token_type_ids"] = (rows["input_ids"] == 100).long()
    passes: list[int] = []
    tower = getattr(model.model, "visual", None) or getattr(model.model, "vision_tower", None)
    tower = model.model.vision_model if tower is None else tower
    hook = tower.register_forward_hook(lambda *_: passes.append(1))
    given = plain(model, rows, 3, set())
    hook.remove()
    assert len(passes) == 1
    one = [{name: value.chunk(2)[n] for name, value in picture.items()} for n in range(2)]
    for n, question in enumerate(questions):
        seen = {**one[n], **({"mm_token_type_ids": None} if "mm_token_type_ids" in batch else {})}
        assert given[n] == by_loops(model, question, LENGTH, 3, **seen)


def test_the_schedule_keeps_every_token_once() -> None:
    assert schedule(8, 3) == [3, 3, 2]
    assert schedule(4, 4) == [1] * 4
    assert schedule(5, 1) == [5]
    for steps in (0, 6):
        with pytest.raises(ValueError, match="each pass keeps one at least"):
            schedule(5, steps)


TABLE = {"red?": "a rose", "blue?": "the sky", "round?": "a ball", "cold?": "ice", "far?": "the moon"}


class Questions:
    """Texts without pictures, laid out as a collator of pictures lays out its rows."""

    def __init__(self, tokenizer: Any) -> None:
        self.processor = SimpleNamespace(tokenizer=tokenizer)
        self.end_ids = [tokenizer.eos_token_id]

    def __call__(self, rows: list[str]) -> dict[str, torch.Tensor]:
        tokenizer = self.processor.tokenizer
        return padded(
            [
                (tokenizer(row)["input_ids"], [*tokenizer(TABLE[row])["input_ids"], tokenizer.eos_token_id])
                for row in rows
            ]
        )

    def asked(self, rows: list[str]) -> dict[str, torch.Tensor]:
        return asked([self.processor.tokenizer(row)["input_ids"] for row in rows])


@pytest.mark.parametrize("steps", [None, 3])
def test_what_was_learned_is_answered(tiny_model: Path, steps: int | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        "llama",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = AutoModelForCausalLM.from_config(made)
    collate = Questions(tokenizer)
    settings = VisionSettings(answer_length=9, unmask_steps=steps, mask_token="<|im_start|>")
    rows = list(TABLE) * (AT_ONCE // len(TABLE) + 1)
    assert answer_by_unmasking(model, collate.processor, collate, rows, PLAN, settings) != [
        TABLE[row] for row in rows
    ]

    objective = MaskedDiffusion(
        model,
        mask_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        end_id=tokenizer.eos_token_id,
        seed=0,
        answer_length=settings.answer_length,
    )
    batch = collate(list(TABLE))
    objective.check(batch, PLAN)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        masked = objective.inputs(batch, step)
        loss, _ = objective.loss(model(**masked.inputs).logits, masked.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert answer_by_unmasking(model, collate.processor, collate, rows, PLAN, settings) == [
        TABLE[row] for row in rows
    ]


def test_each_picture_gets_its_own_answer() -> None:
    """One question, two pictures: only the pictures tell the answers apart, shared by both halves of a batch."""
    model = seeing_model("llava")
    batch = seen_batch(model)
    width = int(batch["attention_mask"].sum(1).min())
    question = batch["input_ids"][1, : width - 2].tolist()
    rows = padded([(question, [20, 21, END]), (question, [22, 23, 24, END])])
    rows["pixel_values"] = batch["pixel_values"]
    objective = MaskedDiffusion(model, mask_id=MASK, end_id=END, seed=0, answer_length=LENGTH)
    objective.check(rows, PLAN)
    assert objective.two_way.shares
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(80):
        masked = objective.inputs(rows, step)
        with objective.pictures_once():
            loss, _ = objective.loss(model(**masked.inputs).logits, masked.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seen = {**asked([question] * 2), "pixel_values": batch["pixel_values"]}
    assert plain(model, seen, LENGTH, {END}) == [[20, 21], [22, 23, 24]]
    seen["pixel_values"] = batch["pixel_values"].flip(0)
    assert plain(model, seen, LENGTH, {END}) == [[22, 23, 24], [20, 21]]
