"""The whole way from a source to rows for a trainer, and the report on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trimtab.config.schema import DataSettings, ModelSettings
from trimtab.data.prepare import PreparedData, prepare_data
from trimtab.errors import RequestError

Write = Callable[..., str]


def prepare(
    tokenizer: PreTrainedTokenizerFast, source: str | Path, seed: int = 0, **settings: Any
) -> PreparedData:
    return prepare_data(DataSettings(source=str(source), **settings), tokenizer, seed)


def alpaca(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"instruction": f"question {i}", "output": f"answer {i}", **more} for i in range(number)]


def trained(tokenizer: PreTrainedTokenizerFast, row: dict[str, list[int]]) -> str:
    return tokenizer.decode([token for token in row["labels"] if token != -100])


@pytest.mark.slow
def test_the_built_in_set_with_the_built_in_model() -> None:
    from trimtab.models import load_tokenizer

    tokenizer = load_tokenizer(ModelSettings())
    data = prepare_data(DataSettings(), tokenizer, seed=0)
    assert data.report.train.format == "alpaca"
    assert data.report.train.dropped == {}
    assert data.report.rows_train > 5 * data.report.rows_eval > 0
    rows = [json.loads(line) for line in shipped().read_text(encoding="utf-8").splitlines()]
    answers = {row["output"] for row in rows}
    for row in data.train:
        answer = trained(tokenizer, row)
        assert answer.endswith("<|im_end|>")
        assert answer.removesuffix("<|im_end|>") in answers
        assert row["labels"].count(tokenizer.eos_token_id) == 1


def shipped() -> Path:
    import trimtab.data

    return Path(trimtab.data.__file__).parent / "shipped" / "device-errors.jsonl"


def test_columns_and_report(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    data = prepare(chatml, write(*alpaca(20, id=7)), eval_fraction=0.2)
    assert data.train.column_names == ["input_ids", "labels"]
    assert (len(data.train), len(data.eval or [])) == (16, 4)
    report = data.report
    text = "\n".join(report.lines())
    assert "format: alpaca (columns instruction, output)" in text
    assert "columns not used: id" in text
    assert "rows: 20 read, 20 kept" in text
    assert "split: 16 rows to train on, 4 held out (data.eval_fraction=0.2, seed 0)" in text
    assert report.tokens == sum(len(row["input_ids"]) for row in data.train)
    assert report.trained_tokens == sum(label != -100 for row in data.train for label in row["labels"])
    assert 0 < report.trained_share < 1
    assert json.loads(json.dumps(report.as_dict()))["train"]["lengths"]["max"] == report.train.lengths.max


def test_the_split_of_7888_rows(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    data = prepare(chatml, write(*alpaca(7888)), seed=42)
    assert (data.report.rows_train, data.report.rows_eval) == (7099, 789)
    shown = {tuple(row) for row in data.train["input_ids"]}
    assert not any(tuple(row) in shown for row in data.eval["input_ids"])  # type: ignore[index]


def test_the_split_follows_the_seed(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    path = write(*alpaca(40))
    first, again, other = (prepare(chatml, path, seed=seed) for seed in (1, 1, 2))
    assert first.eval["input_ids"][:] == again.eval["input_ids"][:]  # type: ignore[index]
    assert first.train["input_ids"][:] == again.train["input_ids"][:]
    assert first.eval["input_ids"][:] != other.eval["input_ids"][:]  # type: ignore[index]


def test_no_evaluation(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    data = prepare(chatml, write(*alpaca(1)), eval_fraction=0)
    assert (len(data.train), data.eval) == (1, None)


def test_one_row_cannot_be_split(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    with pytest.raises(RequestError, match=r"set data\.eval_fraction=0"):
        prepare(chatml, write(*alpaca(1)))


def test_two_rows_hold_one_out(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    assert prepare(chatml, write(*alpaca(2))).report.rows_eval == 1


def test_bad_rows_are_dropped_and_counted(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    path = write(
        *alpaca(10), {"instruction": "a", "output": None}, {"instruction": "b", "output": " "}, *alpaca(3)
    )
    report = prepare(chatml, path).report
    assert report.train.dropped == {
        "repeats an earlier row": 3,
        "`output` is null": 1,
        "`output` is empty": 1,
    }
    assert (report.train.rows_read, report.train.rows_kept) == (15, 10)
    assert report.train.first_dropped["`output` is null"] == f"{path}, line 11"
    assert f"dropped 3: repeats an earlier row (first: {path}, line 13)" in "\n".join(report.lines())


def test_bad_rows_can_stop_the_run(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    with pytest.raises(RequestError, match=r"line 3: `output` is null"):
        prepare(chatml, write(*alpaca(2), {"instruction": "a", "output": None}), bad_rows="stop")


def test_kept_duplicates_stay_on_one_side(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    data = prepare(chatml, write(*(alpaca(6) * 5)), keep_duplicates=True, eval_fraction=0.3)
    assert data.report.rows_train + data.report.rows_eval == 30
    train, held = ({tuple(row) for row in part["input_ids"]} for part in (data.train, data.eval))  # type: ignore[index]
    assert train
    assert held
    assert not train & held


def test_rows_that_lose_their_answer_to_truncation(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    rows = alpaca(5) + [{"instruction": "word " * 100 + str(i), "output": "never seen"} for i in range(3)]
    data = prepare(chatml, write(*rows), max_length=60)
    assert "note: 3 rows lose every answer token at data.max_length=60; raise it" in "\n".join(
        data.report.lines()
    )
    assert data.report.train.dropped == {"no answer token left at data.max_length=60": 3}
    for part in (data.train, data.eval):
        assert all(any(label != -100 for label in row["labels"][1:]) for row in part)


def test_long_answers_are_cut_at_the_start_kept_or_dropped(
    chatml: PreTrainedTokenizerFast, write: Write
) -> None:
    path = write(*alpaca(5), {"instruction": "a", "output": "word " * 100})
    data = prepare(chatml, path, max_length=60, eval_fraction=0)
    assert max(map(len, data.train["input_ids"])) == 60
    assert data.report.train.cut == 1
    assert "1 row cut at data.max_length=60" in "\n".join(data.report.lines())
    dropping = prepare(chatml, path, max_length=60, eval_fraction=0, too_long="drop")
    assert len(dropping.train) == 5
    assert dropping.report.train.dropped == {"longer than data.max_length=60 (data.too_long=drop)": 1}


def test_nothing_left_is_an_error_with_the_counts(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    with pytest.raises(
        RequestError, match=r"none of its 2 rows can be trained on\n.*2 no answer token left.*\n.*raise"
    ):
        prepare(chatml, write(*alpaca(2)), max_length=8)
    with pytest.raises(RequestError, match=r"none of its 1 rows .*\n.*`output` is null"):
        prepare(chatml, write({"instruction": "a", "output": None}))


def test_rows_that_become_equal_are_not_held_out(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    rows = [{"text": "the same beginning " * 10 + str(i)} for i in range(4)]
    with pytest.raises(
        RequestError, match=r"every row held out equals a training row .*\n.*data\.max_length=30"
    ):
        prepare(chatml, write(*rows), max_length=30)


def test_a_separate_evaluation_source_and_its_overlap(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    train = write(*alpaca(6), name="a.jsonl")
    other = write(
        {"prompt": "question 2", "completion": "answer 2"}, {"prompt": "x", "completion": "y"}, name="b.jsonl"
    )
    data = prepare(chatml, train, eval_source=other)
    assert (data.report.rows_train, data.report.rows_eval) == (6, 2)
    assert data.report.eval is not None
    assert data.report.eval.format == "prompt_completion"
    assert data.report.notes == [
        "data.eval_source and data.source overlap: 1 row of evaluation is also trained on"
    ]
    with pytest.raises(RequestError, match=r"data\.eval_source=.*nowhere"):
        prepare(chatml, train, eval_source=str(Path(other).parent / "nowhere.jsonl"))


def test_mixed_formats_name_the_odd_row(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    with pytest.raises(RequestError, match=r"rows\.jsonl, line 3: a text row .* among alpaca rows"):
        prepare(chatml, write(*alpaca(2), {"text": "odd"}))


def test_a_length_over_the_model_s_own_is_said(chatml: PreTrainedTokenizerFast, write: Write) -> None:
    chatml.model_max_length = 512
    try:
        notes = prepare(chatml, write(*alpaca(4)), max_length=600).report.notes
    finally:
        chatml.model_max_length = int(1e30)
    assert notes == ["data.max_length=600 is over the model's own limit of 512"]


def test_the_same_rows_from_json_csv_and_parquet(chatml: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = alpaca(5)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "output"], lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
    found = [
        prepare(chatml, tmp_path / name, eval_fraction=0).train["input_ids"][:]
        for name in ("a.json", "a.parquet", "a.csv")
    ]
    assert found[0] == found[1] == found[2]


def test_conversations_in_parquet(chatml: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "Bo"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    data = prepare(chatml, tmp_path / "a.parquet", eval_fraction=0)
    assert trained(chatml, data.train[0]) == "b<|im_end|>"


def test_a_thousand_alpaca_rows(chatml: PreTrainedTokenizerFast, shared_data: Path) -> None:
    report = prepare(chatml, shared_data / "alpaca" / "alpaca_en_demo.json", max_length=8192).report
    assert report.train.rows_read == 999
    assert report.train.dropped == {"repeats an earlier row": 14}
    assert report.rows_train + report.rows_eval == 985


def test_three_hundred_tool_conversations(chatml: PreTrainedTokenizerFast, shared_data: Path) -> None:
    report = prepare(chatml, shared_data / "sharegpt", max_length=65536).report
    assert report.train.format == "sharegpt"
    assert report.train.rows_read == 300
    assert set(report.train.dropped) == {"repeats an earlier row"}
    assert (
        report.train.changed[
            "tools described in the system message (the chat template has no place for them)"
        ]
        > 100
    )


def test_gsm8k_with_the_suggested_mapping(chatml: PreTrainedTokenizerFast, shared_data: Path) -> None:
    folder = shared_data / "gsm8k"
    with pytest.raises(
        RequestError, match=r"data\.columns\.prompt=question data\.columns\.completion=answer"
    ):
        prepare(chatml, folder)
    columns = {"prompt": "question", "completion": "answer"}
    report = prepare(chatml, folder, columns=columns, max_rows=200).report
    assert report.train.rows_kept == 200
    assert report.train.notes == ["data.split=train left out test.jsonl"]
