"""Samples are asked exactly as training rendered its rows; held-out answers are counted by whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.models import load_model, load_tokenizer
from trimtab.models.sample import AT_ONCE, answer, held_out_answers, prompt_ids
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")

PROMPTS = [f"What is the answer to question {'o' * (3 * n)}?" for n in range(AT_ONCE + 5)]


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> tuple[Any, Any]:
    settings = ModelSettings(name=str(tiny_model))
    return load_model(settings, PLAN), load_tokenizer(settings)


def greedy(model: Any, ids: list[int], length: int) -> list[int]:
    """Token by token, whole text each time: no batch, no padding, no cache."""
    import torch

    new: list[int] = []
    with torch.no_grad():
        for _ in range(length):
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


def row(asked: list[int], expected: list[int], after: int = 0) -> dict[str, list[int]]:
    """A held-out row as data preparation makes it, with `after` tokens behind the answer."""
    rest = [0] * after
    return {"input_ids": asked + expected + rest, "labels": [-100] * len(asked) + expected + [-100] * after}


def test_a_tokenizer_that_adds_bos_gets_exactly_one(tiny_model: Path) -> None:
    from tokenizers import processors

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    eos = tokenizer.eos_token_id
    plain = prompt_ids(tokenizer, "Hello")
    assert plain[0] == start
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", eos)]
    )
    assert prompt_ids(tokenizer, "Hello") == [eos, *plain]
    tokenizer.chat_template = "<|im_end|>" + tokenizer.chat_template
    assert prompt_ids(tokenizer, "Hello") == [eos, *plain]


def test_answers_are_greedy_and_leave_the_mode_alone(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    model.train()
    first = answer(model, tokenizer, ["What is 1 plus 1?", "Hi"], PLAN, 8)
    assert answer(model, tokenizer, ["What is 1 plus 1?", "Hi"], PLAN, 8) == first
    assert len(first) == 2
    assert model.training


def test_a_batch_answers_as_each_prompt_alone(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    together = answer(model, tokenizer, PROMPTS, PLAN, 6)
    alone = [tokenizer.decode(greedy(model, prompt_ids(tokenizer, p), 6)).strip() for p in PROMPTS]
    assert together == alone
    assert len(set(together)) > 1


def test_whole_answers_are_counted(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    said = [greedy(model, prompt_ids(tokenizer, p), 6) for p in PROMPTS]
    rows = [
        row(prompt_ids(tokenizer, p), ids, after=n % 3)
        for n, (p, ids) in enumerate(zip(PROMPTS, said, strict=True))
    ]
    rows[1] = row(prompt_ids(tokenizer, PROMPTS[1]), said[1][:4])  # as data.max_length cuts an answer
    every = len(PROMPTS)
    assert held_out_answers(model, tokenizer, rows, PLAN, every) == {"right": every, "of": every}
    assert held_out_answers(model, tokenizer, rows, PLAN, 3) == {"right": 3, "of": 3}
    assert held_out_answers(model, tokenizer, rows, PLAN, every + 9)["of"] == every

    # One token at the end is wrong, in the first row and in the last one.
    for place in (0, -1):
        asked, ids = prompt_ids(tokenizer, PROMPTS[place]), said[place]
        rows[place] = row(asked, [*ids[:-1], (ids[-1] + 1) % 200 + 10])
    assert held_out_answers(model, tokenizer, rows, PLAN, every) == {"right": every - 2, "of": every}


def test_an_answer_that_goes_on_is_not_the_same(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    asked = prompt_ids(tokenizer, PROMPTS[0])
    said = greedy(model, asked, 5)
    assert tokenizer.eos_token_id not in said
    ended = [*said[:4], tokenizer.eos_token_id]
    assert held_out_answers(model, tokenizer, [row(asked, ended)], PLAN, 1) == {"right": 0, "of": 1}


def test_an_answer_ends_at_its_end_token(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = parts
    asked = prompt_ids(tokenizer, PROMPTS[0])
    said = greedy(model, asked, 5)
    end = next(token for token in said[1:] if token != said[0])
    first = said.index(end)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, tokenizer.eos_token_id])
    longer = row(prompt_ids(tokenizer, PROMPTS[1]), [5] * 9)
    rows = [row(asked, said[: first + 1]), longer]
    assert held_out_answers(model, tokenizer, rows, PLAN, 2) == {"right": 1, "of": 2}
    rows = [row(asked, said[:first]), longer]
    assert held_out_answers(model, tokenizer, rows, PLAN, 2) == {"right": 0, "of": 2}


def test_the_last_answer_of_a_conversation_is_asked_for(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    earlier = row(prompt_ids(tokenizer, PROMPTS[0]), [7, 8, 9])
    asked = earlier["input_ids"] + prompt_ids(tokenizer, PROMPTS[1])
    said = greedy(model, asked, 4)
    labels = earlier["labels"] + [-100] * (len(asked) - len(earlier["labels"])) + said
    rows = [{"input_ids": asked + said, "labels": labels}]
    assert held_out_answers(model, tokenizer, rows, PLAN, 1) == {"right": 1, "of": 1}


def test_rows_without_a_question_are_refused(parts: tuple[Any, Any]) -> None:
    with pytest.raises(RequestError, match=r"samples\.held_out=0"):
        held_out_answers(*parts, [row([], [5, 6, 7])], PLAN, 1)
