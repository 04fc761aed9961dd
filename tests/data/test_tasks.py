"""The GLUE+ tasks: prompts and gold answers by hand, rows that cannot be used, and the places rows come from."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trimtab.data.read import Row
from trimtab.data.tasks import TASKS, task
from trimtab.data.tasks.load import load_task
from trimtab.errors import RequestError

GLUE = {"cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"}
PLUS = {"boolq", "cb", "copa", "wic", "wsc", "multirc", "record", "squad"}

CASES: list[tuple[str, dict[str, Any], str, list[str], int]] = [
    ("sst2", {"sentence": "fine work ", "label": 1}, "fine work It was", [" terrible", " great"], 1),
    (
        "rte",
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0},
        'It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n',
        ["Yes", "No"],
        0,
    ),
    (
        "wnli",
        {"sentence1": "A.", "sentence2": "B.", "label": "1"},
        'A.\nDoes this mean that "B." is true? Yes or No?\n',
        ["No", "Yes"],
        1,
    ),
    ("boolq", {"passage": "P.", "question": "is it so", "answer": True}, "P. Is it so?\n", ["No", "Yes"], 1),
    (
        "copa",
        {
            "premise": "I ran.",
            "choice1": "The dog barked.",
            "choice2": "I was late.",
            "question": "cause",
            "label": 1,
        },
        "I ran because",
        [" the dog barked.", " I was late."],
        1,
    ),
    (
        "copa",
        {"premise": "I ran.", "choice1": "A.", "choice2": "Isabel slept.", "question": "effect", "label": 0},
        "I ran so",
        [" a.", " isabel slept."],
        0,
    ),
    (
        "wsc",
        {"text": "Ann saw Bo; she waved.", "span1_text": "Ann", "span2_text": "She", "label": 1},
        'Ann saw Bo; she waved.\nIn the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n',
        ["No", "Yes"],
        1,
    ),
    (
        "record",
        {
            "passage": "Ada met Bo.\n@highlight\nIt rained.",
            "query": "@placeholder sang.",
            "entities": ["Ada", "Bo", "Ada"],
            "answers": ["Bo"],
        },
        'Ada met Bo.\n- It rained.\n@placeholder sang.\nQuestion: what is the "@placeholder"\nAnswer:',
        [" Ada", " Bo"],
        1,
    ),
    (
        "squad",
        {
            "title": "T",
            "context": "C.",
            "question": "Q?",
            "answers": {"text": ["a", "b"], "answer_start": [0, 1]},
        },
        "Title: T\nContext: C.\nQuestion: Q?\nAnswer:",
        [" a\n"],
        0,
    ),
    (
        "cb",
        {"premise": "P.", "hypothesis": "h", "label": 2},
        'Suppose P. Can we infer that "h"? Yes, No, or Maybe?\n',
        ["Yes", "No", "Maybe"],
        2,
    ),
    (
        "mnli",
        {"premise": "P.", "hypothesis": "h", "label": 2},
        'Suppose P. Can we infer that "h"? Yes, No, or Maybe?\n',
        ["Yes", "Maybe", "No"],
        2,
    ),
]


def test_the_seventeen_tasks_are_there() -> None:
    assert set(TASKS) == GLUE | PLUS
    assert {name for name, t in TASKS.items() if t.hub == "nyu-mll/glue"} == GLUE


@pytest.mark.parametrize(("name", "row", "prompt", "options", "gold"), CASES)
def test_a_row_becomes_prompt_options_and_gold(
    name: str, row: dict[str, Any], prompt: str, options: list[str], gold: int
) -> None:
    one = TASKS[name]
    assert (one.prompt(row), one.options(row), one.gold(row)) == (prompt, options, gold)
    question = one.question(row)
    assert (question.prompt, question.options, question.gold) == (prompt, options, gold)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_an_answer_begins_a_word_of_its_own(name: str) -> None:
    one = TASKS[name]
    row = load_task(one, "sample").splits["train"][0]
    for option in one.options(row):
        assert one.prompt(row).endswith("\n") != option.startswith(" ")


def test_stsb_is_trained_on_the_rounded_class_and_judged_by_the_score() -> None:
    row = {"sentence1": "a", "sentence2": "b"}
    golds = [TASKS["stsb"].gold({**row, "label": s}) for s in (0, 0.49, 0.5, 2.5, 3.4, 4.75, 5)]
    assert golds == [0, 0, 1, 3, 3, 5, 5]
    assert TASKS["stsb"].question({**row, "score": "3.4"}).value == 3.4
    with pytest.raises(RequestError, match=r"label 5\.2"):
        TASKS["stsb"].gold({**row, "label": 5.2})


def test_references_and_groups() -> None:
    squad = load_task(TASKS["squad"], "sample").splits["validation"][2]
    assert TASKS["squad"].question(squad).references == ("crocus flowers", "crocus")
    rows = load_task(TASKS["multirc"], "sample").splits["validation"]
    by_number = [TASKS["multirc"].question(r).group for r in rows]
    by_text = [
        TASKS["multirc"].question({k: v for k, v in r.values.items() if k != "idx"}).group for r in rows
    ]
    assert Counter(by_number).most_common() == [("100/100", 3), ("101/101", 3), ("102/102", 2)]
    assert [by_text.index(g) for g in by_text] == [by_number.index(g) for g in by_number]


@pytest.mark.parametrize("name", ["SST-2", "sst_2", " sst2 ", "STS-B", "sts", "MultiNLI", "wsc.fixed"])
def test_names_are_read_as_people_write_them(name: str) -> None:
    assert task(name).name in ("sst2", "stsb", "mnli", "wsc")


def test_an_unknown_task_says_which_ones_are_near() -> None:
    with pytest.raises(RequestError) as caught:
        task("multi_rk")
    assert "did you mean multirc" in str(caught.value)
    assert "boolq" in str(caught.value)


def test_a_missing_column_names_the_row_and_what_is_there() -> None:
    with pytest.raises(RequestError) as caught:
        TASKS["mrpc"].question(Row({"sentence1": "a", "text": "b", "label": 0}, "x.jsonl", 7, "line"))
    text = str(caught.value)
    assert "x.jsonl, line 7: no column `sentence2`" in text
    assert "the row has sentence1, text, label" in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"sentence": "a", "label": -1}, "the label is hidden"),
        ({"sentence": "a", "label": 2}, "labels go from 0 to 1"),
        ({"sentence": "a", "label": 0.5}, "a whole number"),
        ({"sentence": "a", "label": "good"}, "a number"),
        ({"sentence": "a", "label": None}, "null in column `label`"),
        ({"sentence": " ", "label": 1}, "needs text there"),
        ({"sentence": 3, "label": 1}, "needs text there"),
        ({"sentence": "a", "label": float("inf")}, "a number"),
        ({"sentence": "a", "label": 10**400}, "a number"),
        ({"sentence": "\ud800", "label": 1}, "half of a surrogate pair"),
        ({"prompt": "a", "candidates": 7, "label": 1}, "candidates as a list"),
        ({"prompt": "a", "candidates": "ab", "label": 1}, "candidates as a list"),
    ],
)
def test_a_label_or_text_that_cannot_be_used(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        TASKS["sst2"].question(row)


def test_a_hidden_score_is_said_to_be_hidden_too() -> None:
    with pytest.raises(RequestError, match="hidden"):
        TASKS["stsb"].gold({"sentence1": "a", "sentence2": "b", "label": -1.0})


def test_record_needs_its_answer_among_the_entities() -> None:
    row = {"passage": "p", "query": "q", "entities": ["A"], "answers": ["B"]}
    with pytest.raises(RequestError, match="none of the answers"):
        TASKS["record"].question(row)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_shipped_sample_is_whole_and_balanced(name: str) -> None:
    one, rows = TASKS[name], load_task(TASKS[name], "sample")
    large = name in ("sst2", "cola", "mrpc", "rte")
    assert rows.origin == "sample"
    assert "smoke test" in rows.source
    assert set(rows.splits) == set(one.splits)
    seen: set[str] = set()
    for split, part in rows.splits.items():
        questions = [one.question(row) for row in part]
        assert len(part) >= (24 if large and split == "train" else 16 if large else 8)
        if one.kind == "classification":
            shares = Counter(q.gold for q in questions)
            assert max(shares.values()) <= 0.63 * len(part), (split, shares)
        keys = [json.dumps([q.prompt, q.options]) for q in questions]
        assert not seen & set(keys)
        seen |= set(keys)
        assert len(set(keys)) == len(keys)


def test_no_shipped_row_is_in_the_public_sets(shared_data: Path) -> None:
    for name in ("sst2", "cola", "mrpc", "rte"):
        public = load_task(TASKS[name], shared_data / "glue")
        sample = load_task(TASKS[name], "sample")
        texts = [
            {
                v
                for rows in place.splits.values()
                for r in rows
                for v in r.values.values()
                if isinstance(v, str)
            }
            for place in (public, sample)
        ]
        assert not (texts[0] & texts[1]) - {"train", "validation"}


def test_real_rows_of_every_file_can_be_asked(shared_data: Path) -> None:
    for name in ("sst2", "cola", "mrpc", "rte"):
        rows = load_task(TASKS[name], shared_data / "glue")
        assert all(TASKS[name].question(r).prompt for part in rows.splits.values() for r in part)


def test_rows_are_drawn_by_the_seed_and_evaluation_stays_the_same() -> None:
    def drawn(seed: int) -> dict[str, list[int]]:
        rows = load_task(TASKS["sst2"], "sample", train_rows=10, eval_rows=6, seed=seed)
        assert rows.found == {"train": 28, "validation": 16}
        return {split: [r.number for r in part] for split, part in rows.splits.items()}

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again
    assert first["train"] != other["train"]
    assert first["validation"] == other["validation"]
    assert len(set(first["train"])) == 10


def test_questions_of_multirc_are_drawn_whole() -> None:
    one = TASKS["multirc"]
    everything = Counter(one.question(r).group for r in load_task(one, "sample").splits["validation"])
    part = Counter(one.question(r).group for r in load_task(one, "sample", eval_rows=5).splits["validation"])
    assert 2 <= sum(part.values()) <= 5
    assert all(everything[group] == count for group, count in part.items())


@pytest.mark.parametrize("suffix", ["jsonl", "json", "tsv", "csv", "parquet"])
def test_a_local_folder_in_every_format(tmp_path: Path, suffix: str) -> None:
    home = tmp_path / "SST-2"
    home.mkdir()
    rows = [{"sentence": f"film {n}", "label": n % 2} for n in range(4)]
    for name in ("train", "dev"):
        path = home / f"{name}.{suffix}"
        if suffix == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix in ("tsv", "csv"):
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(
                    file, ["sentence", "label"], delimiter="\t" if suffix == "tsv" else ","
                )
                writer.writeheader()
                writer.writerows(rows)
        else:
            lines = [json.dumps(r) for r in rows]
            path.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    loaded = load_task(TASKS["sst2"], tmp_path)
    assert loaded.origin == "folder"
    assert [TASKS["sst2"].gold(r) for r in loaded.splits["validation"]] == [0, 1, 0, 1]


def test_mnli_takes_both_validation_files(tmp_path: Path) -> None:
    (tmp_path / "mnli").mkdir()
    row = json.dumps({"premise": "p", "hypothesis": "h", "label": 0})
    for name in ("train", "validation_matched", "validation_mismatched"):
        (tmp_path / "mnli" / f"{name}.jsonl").write_text(row)
    assert load_task(TASKS["mnli"], tmp_path).evaluated == ["validation", "validation_mismatched"]
    (tmp_path / "mnli" / "validation_mismatched.jsonl").unlink()
    assert load_task(TASKS["mnli"], tmp_path).evaluated == ["validation"]


def test_a_folder_without_the_task_or_the_split_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        load_task(TASKS["cola"], tmp_path / "none")
    (tmp_path / "rte").mkdir()
    with pytest.raises(RequestError, match="there are rte in it"):
        load_task(TASKS["cola"], tmp_path)
    (tmp_path / "rte" / "train.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 0}')
    with pytest.raises(RequestError, match=r"no validation file(.|\n)*train\.jsonl"):
        load_task(TASKS["rte"], tmp_path)


def test_the_sample_is_taken_only_where_no_place_was_named() -> None:
    assert load_task(TASKS["cb"], hub=lambda: False).origin == "sample"
    with pytest.raises(RequestError, match="could not be loaded from the hub"):
        load_task(TASKS["cb"], "hub", hub=lambda: False)
