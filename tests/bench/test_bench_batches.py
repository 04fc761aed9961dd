"""Batches as token tensors, token lists, text or a mixture, on the way that a benchmark's and a run's data take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.bench.evaluate import Layout, evaluate_rows
from trimtab.bench.glue import run_glue
from trimtab.bench.glue_cell import GlueRequest
from trimtab.bench.methods import Tuning, batches
from trimtab.config.schema import Config, ModelSettings
from trimtab.data.read import Row
from trimtab.data.scored import prepare_scored
from trimtab.data.tasks import TASKS, Task
from trimtab.data.tasks.load import load_task
from trimtab.data.tasks.task import questions_of
from trimtab.errors import RequestError
from trimtab.models import load_model, load_tokenizer
from trimtab.monitor.progress import make_progress
from trimtab.placement import PlacementPlan
from trimtab.recipes.zeroth_order import encode_all
from trimtab.zeroth.batches import by_length
from trimtab.zeroth.objective import Example

CPU = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
ROW = {"sentence": "what is this", "label": 1}
OPTIONS = [" terrible", " great"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(ModelSettings(name=str(tiny_model)))


@pytest.fixture
def wanted(tokenizer: Any) -> Example:
    prompt = tokenizer("what is this It was")["input_ids"]
    return Example(prompt, [tokenizer(option)["input_ids"] for option in OPTIONS], 1)


def examples(batch: Any, tokenizer: Any, task: Task | None = None) -> list[Example]:
    layout = Layout(tokenizer, 4, 256)
    return [layout.encode(question) for question in questions_of(batch, task)]


def test_a_mixture_gives_the_same_example_in_every_form(tokenizer: Any, wanted: Example) -> None:
    sst2 = TASKS["sst2"]
    ids = wanted.prompt
    mixture = [
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
        {"input_ids": ids, "labels": torch.tensor(1)},
    ]
    assert examples(mixture, tokenizer, sst2) == [wanted] * len(mixture)
    questions = questions_of(mixture, sst2)
    tuning = Tuning(steps=1, batch_size=len(mixture), learning_rate=0.0, eps=None, seed=0)
    layout = Layout(tokenizer, 4, 256)
    (batch,) = batches(sst2, questions, layout, tuning)()
    same = layout.collate([wanted] * len(mixture))
    assert torch.equal(batch.input_ids, same.input_ids)
    assert batch.label.tolist() == [1] * len(mixture)


def test_columns_of_tensors_lists_and_texts(tokenizer: Any, wanted: Example) -> None:
    ids, width = wanted.prompt, len(wanted.prompt)
    padded = torch.tensor([[0] * 3 + ids, ids + [0] * 3])
    mask = torch.tensor([[0] * 3 + [1] * width, [1] * width + [0] * 3])
    columns = [
        {"input_ids": padded, "attention_mask": mask, "label": torch.tensor([1, 1])},
        {"input_ids": [ids, ids], "label": [1, 1]},
        {"sentence": ["what is this"] * 2, "label": [1, 1]},
        tokenizer(["what is this It was"] * 2) | {"labels": [1, 1]},
    ]
    for batch in columns:
        assert examples(batch, tokenizer, TASKS["sst2"]) == [wanted, wanted]


def test_a_single_row_counts_as_a_batch_of_one(tokenizer: Any, wanted: Example) -> None:
    for row in (ROW, Row(ROW, "x.jsonl", 3), TASKS["sst2"].question(ROW)):
        assert examples(row, tokenizer, TASKS["sst2"]) == [wanted]
    for ids in (wanted.prompt, torch.tensor(wanted.prompt), np.array(wanted.prompt)):
        row = {"input_ids": ids, "label": 1, "candidates": OPTIONS}
        assert examples(row, tokenizer) == [wanted]


def test_a_model_is_measured_the_same_in_every_form(tokenizer: Any, tiny_model: Path) -> None:
    """STS-B needs the score beside its class, MultiRC the question that an answer belongs to, COPA its own choices."""
    model = load_model(ModelSettings(name=str(tiny_model)), CPU)
    for name in ("stsb", "multirc", "copa", "record", "mrpc"):
        one = TASKS[name]
        rows = [row.values for row in load_task(one, "sample").splits["validation"]]
        texts = set(one.columns) - {"label", "choice1", "choice2", "entities", "answers"}
        tokens = [
            {
                **{key: value for key, value in row.items() if key not in texts or "score" in key},
                "input_ids": torch.tensor(tokenizer(one.prompt(row))["input_ids"]),
            }
            for row in rows
        ]
        assert not any(set(row) >= set(one.columns) for row in tokens)
        assert evaluate_rows(model, tokenizer, one, tokens) == evaluate_rows(model, tokenizer, one, rows)


def test_a_batch_holds_so_many_rows_the_longest_first() -> None:
    """Candidates of one token share a row; others have one each, and an example is never parted."""
    short = [Example([1] * n, [[2], [3]], 0) for n in (4, 6)]
    long = [Example([1] * n, [[2], [3, 4], [5]], 0) for n in (9, 7, 3)]
    assert by_length([*short, *long], 4, by_rows=True) == [[2], [3, 1], [0, 4]]
    assert by_length([*short, *long], 2, by_rows=True) == [[2], [3], [1, 0], [4]]
    assert by_length([*short, *long], 4) == [[2, 3, 1, 0], [4]]


def test_without_a_task_rows_bring_their_own_answers(tokenizer: Any, tiny_model: Path) -> None:
    model = load_model(ModelSettings(name=str(tiny_model)), CPU)
    rows = [{"input_ids": [5, 6, 7], "candidates": [[8], [9, 10]], "label": n % 2} for n in range(4)]
    found = evaluate_rows(model, tokenizer, None, rows)
    assert found["accuracy"] == 0.5
    assert found["loss"] > 0


def tokenized(folder: Path, tokenizer: Any) -> Path:
    """SST-2's sample as files whose rows are token lists and texts by turns."""
    one = TASKS["sst2"]
    (folder / "sst2").mkdir(parents=True)
    for split, rows in load_task(one, "sample").splits.items():
        lines: list[Any] = []
        for number, row in enumerate(rows):
            ids = tokenizer(one.prompt(row))["input_ids"]
            lines.append({"input_ids": ids, "label": row.values["label"]} if number % 2 else row.values)
        path = folder / "sst2" / f"{split}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


def test_files_of_tokens_and_texts_go_through_the_benchmark(
    tokenizer: Any, tiny_model: Path, tmp_path: Path
) -> None:
    cells = []
    for data in ("sample", str(tokenized(tmp_path / "data", tokenizer))):
        request = GlueRequest(
            tasks=("sst2",),
            methods=("zero-shot", "mezo"),
            data=data,
            model=str(tiny_model),
            device="cpu",
            steps=2,
            max_length=256,
        )
        out = tmp_path / f"out-{len(cells)}"
        outcome = run_glue(request, out, lambda line: None, make_progress("none"))
        assert not outcome.failed
        cells.append([(c["metrics"], c["curve"][-1:]) for c in outcome.results.cells.values()])
    for plain, mixed in zip(*cells, strict=True):
        assert plain[0] == mixed[0]
        assert [p["loss"] for p in plain[1]] == [p["loss"] for p in mixed[1]]


def test_files_of_tokens_and_texts_go_through_a_run(tokenizer: Any, tmp_path: Path) -> None:
    found = []
    for source in ("sample", str(tokenized(tmp_path / "data", tokenizer))):
        config = Config.model_validate(
            {"recipe": "zeroth_order", "data": {"source": source}, "zeroth": {"task": "sst2"}}
        )
        data = prepare_scored(config)
        found.append([encode_all(tokenizer, part, config, print)[0] for part in (data.train, data.eval)])
    assert found[0] == found[1]
    assert len(found[0][0]) > 4


def test_token_wise_labels_make_a_teacher_forced_answer(tokenizer: Any) -> None:
    row = {
        "input_ids": torch.tensor([9, 5, 6, 7, 8]),
        "attention_mask": torch.tensor([0, 1, 1, 1, 1]),
        "labels": torch.tensor([-100, -100, -100, 7, 8]),
    }
    assert examples([row], tokenizer) == [Example([5, 6], [[7, 8]], 0)]
    assert examples([row], tokenizer, TASKS["squad"]) == [Example([5, 6], [[7, 8]], 0)]
    assert examples([{"prompt": "what is", "answer": " this"}], tokenizer)[0].label == 0
    for labels in ([-100] * 5, [-100, 5, 6, 7, 8], [-100, -100, 6, -100, 8], [-100, -100]):
        with pytest.raises(RequestError, match="the batch, row 1"):
            examples([{**row, "labels": labels}], tokenizer)


def test_an_answer_alone_measures_no_choice(tokenizer: Any, tiny_model: Path) -> None:
    model = load_model(ModelSettings(name=str(tiny_model)), CPU)
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    with pytest.raises(RequestError, match="accuracy, which need a choice"):
        evaluate_rows(model, tokenizer, TASKS["sst2"], [row])
    assert set(evaluate_rows(model, tokenizer, None, [row])) == {"loss"}


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
        examples([good, row], tokenizer)
    assert f"the batch, row 2: {said}" in str(caught.value)
    assert f"its keys are {keys}" in str(caught.value)


def test_a_missing_column_of_a_task_names_the_row_too(tokenizer: Any) -> None:
    sst2 = TASKS["sst2"]
    with pytest.raises(RequestError) as caught:
        examples([ROW, {"text": "x", "label": 1}], tokenizer, sst2)
    assert "the batch, row 2: no column `sentence`" in str(caught.value)
    assert "the row has text, label" in str(caught.value)
    with pytest.raises(RequestError, match=r"x\.jsonl, line 3: label -1"):
        examples([Row({**ROW, "label": -1}, "x.jsonl", 3, "line")], tokenizer, sst2)
    with pytest.raises(RequestError, match="row 1: no column `label`"):
        examples([{"input_ids": [1, 2]}], tokenizer, sst2)
    with pytest.raises(RequestError, match="row 1: no column `entities`"):
        examples([{"input_ids": [1, 2], "label": 0}], tokenizer, TASKS["record"])


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
        ("words", "the batch: a str"),
    ]:
        with pytest.raises(RequestError, match=said):
            examples(batch, tokenizer)
