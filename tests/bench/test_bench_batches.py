"""One function for every kind of batch, and errors that name the row and its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.bench.batches import as_examples
from trimtab.config.schema import ModelSettings
from trimtab.data.read import Row
from trimtab.data.tasks import TASKS
from trimtab.errors import RequestError
from trimtab.models import load_tokenizer
from trimtab.zeroth.objective import Example


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(ModelSettings(name=str(tiny_model)))


ROW = {"sentence": "what is this", "label": 1}
OPTIONS = [" terrible", " great"]


@pytest.fixture
def wanted(tokenizer: Any) -> Example:
    prompt = tokenizer("what is this It was")["input_ids"]
    return Example(prompt, [tokenizer(option)["input_ids"] for option in OPTIONS], 1)


def test_a_mixture_gives_the_same_example_in_every_form(tokenizer: Any, wanted: Example) -> None:
    sst2 = TASKS["sst2"]
    ids = wanted.prompt
    mixture = [
        wanted,
        ROW,
        Row(ROW, "x.jsonl", 3),
        sst2.question(ROW),
        {"prompt": "what is this It was", "options": OPTIONS, "label": 1},
        {"input_ids": torch.tensor(ids), "candidates": OPTIONS, "label": torch.tensor(1)},
        {
            "input_ids": ids,
            "candidates": [wanted.candidates[0], torch.tensor(wanted.candidates[1])],
            "label": 1,
        },
        {"input_ids": [0, 0, *ids], "attention_mask": [0, 0, *[1] * len(ids)], "label": 1},
        {"prompt": "what is this It was", "candidates": [OPTIONS[0], wanted.candidates[1]], "label": 1},
        {"prompt": "what is this It was", "label": "1"},
        {"input_ids": list(np.array(ids)), "label": np.int64(1)},
    ]
    assert as_examples(mixture, tokenizer, task=sst2) == [wanted] * len(mixture)


def test_columns_of_tensors_lists_and_texts(tokenizer: Any, wanted: Example) -> None:
    ids, width = wanted.prompt, len(wanted.prompt)
    padded = torch.tensor([[0] * 3 + ids, ids + [0] * 3])
    mask = torch.tensor([[0] * 3 + [1] * width, [1] * width + [0] * 3])
    tensors = {"input_ids": padded, "attention_mask": mask, "label": torch.tensor([1, 1])}
    assert as_examples(tensors, tokenizer, options=OPTIONS) == [wanted, wanted]
    lists = {"input_ids": [ids, ids], "label": [1, 1]}
    assert as_examples(lists, tokenizer, task=TASKS["sst2"]) == [wanted, wanted]
    texts = {"sentence": ["what is this"] * 2, "label": [1, 1]}
    assert as_examples(texts, tokenizer, task=TASKS["sst2"]) == [wanted, wanted]
    assert as_examples(tokenizer(["what is this It was"]) | {"label": [1]}, tokenizer, options=OPTIONS) == [
        wanted
    ]


def test_a_single_row_counts_as_a_batch_of_one(tokenizer: Any, wanted: Example) -> None:
    assert as_examples(ROW, tokenizer, task=TASKS["sst2"]) == [wanted]
    for ids in (wanted.prompt, torch.tensor(wanted.prompt), np.array(wanted.prompt)):
        assert as_examples({"input_ids": ids, "label": 1}, tokenizer, options=OPTIONS) == [wanted]


def test_token_wise_labels_make_a_teacher_forced_answer(tokenizer: Any) -> None:
    row = {
        "input_ids": torch.tensor([9, 5, 6, 7, 8]),
        "attention_mask": torch.tensor([0, 1, 1, 1, 1]),
        "labels": torch.tensor([-100, -100, -100, 7, 8]),
    }
    assert as_examples([row], tokenizer) == [Example([5, 6], [[7, 8]], 0)]
    assert as_examples([{"prompt": "what is", "answer": " this"}], tokenizer)[0].label == 0
    for labels in ([-100] * 5, [-100, 5, 6, 7, 8], [-100, -100, 6, -100, 8], [-100, -100]):
        with pytest.raises(RequestError, match="the batch, row 1"):
            as_examples([{**row, "labels": labels}], tokenizer)


@pytest.mark.parametrize(
    ("row", "said", "keys"),
    [
        ({"ids": [1], "label": 0}, "no input_ids, prompt or text", "ids, label"),
        ({"input_ids": [1, 2], "label": 0}, "no candidates", "input_ids, label"),
        ({"input_ids": [1, 2], "candidates": [[1], [2]]}, "no label", "input_ids, candidates"),
        ({"prompt": "a", "options": ["b", "c"]}, "no label", "prompt, options"),
    ],
)
def test_a_missing_key_names_the_row_and_the_keys(tokenizer: Any, row: Any, said: str, keys: str) -> None:
    good = {"input_ids": [1, 2], "candidates": [[1], [2]], "label": 0}
    with pytest.raises(RequestError) as caught:
        as_examples([good, row], tokenizer)
    assert f"the batch, row 2: {said}" in str(caught.value)
    assert f"its keys are {keys}" in str(caught.value)


def test_a_missing_column_of_a_task_names_the_row_too(tokenizer: Any) -> None:
    with pytest.raises(RequestError) as caught:
        as_examples([ROW, {"text": "x", "label": 1}], tokenizer, task=TASKS["sst2"])
    assert "the batch, row 2: no column `sentence`" in str(caught.value)
    assert "the row has text, label" in str(caught.value)
    with pytest.raises(RequestError, match=r"x\.jsonl, line 3: label -1"):
        as_examples([Row({**ROW, "label": -1}, "x.jsonl", 3, "line")], tokenizer, task=TASKS["sst2"])


def test_other_faults_of_a_batch_are_said(tokenizer: Any) -> None:
    for batch, said in [
        ({"input_ids": [[1], [2]], "label": [0]}, "input_ids: 2, label: 1"),
        ([{"input_ids": [1.5], "candidates": [[1]], "label": 0}], "no list of whole numbers"),
        ([{"input_ids": [[1]], "candidates": [[1]], "label": 0}], "no list of whole numbers"),
        ([{"input_ids": torch.tensor(1), "candidates": [[1]], "label": 0}], "no list of whole numbers"),
        ([{"input_ids": [1], "candidates": [[1], [2]], "label": 0.7}], "row 1: label '0.7'"),
        ([{"input_ids": [1], "candidates": [[1], [2]], "label": "good"}], "row 1: label 'good'"),
        ([{"input_ids": [1], "candidates": [[1], [2]], "label": torch.tensor([0, 1])}], "row 1: label"),
        ([{"input_ids": [1], "candidates": [[1], []], "label": 0}], "without a token"),
        ([{"input_ids": [1], "candidates": [[1], [2]], "label": -1}], "hidden"),
        ([{"input_ids": [1, 2], "attention_mask": [1], "candidates": [[1]]}], "attention_mask has 1"),
        ([7], "a int"),
        (7, "the batch: a int"),
    ]:
        with pytest.raises(RequestError, match=said):
            as_examples(batch, tokenizer)
