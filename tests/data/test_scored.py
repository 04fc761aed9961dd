"""Questions from rows: templates over columns and known tasks, what is dropped, and what stays apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.data.scored import ScoredData, prepare_scored
from trimtab.errors import RequestError

LABELS = 'zeroth.labels={0: " bad", 1: " good"}'


def rows(tmp_path: Path, *values: dict[str, Any], name: str = "rows.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, values)), encoding="utf-8")
    return str(path)


def prepared(*settings: str) -> ScoredData:
    return prepare_scored(load_config(None, ["recipe=zeroth_order", *settings]))


def test_a_template_asks_with_the_columns_of_the_row(tmp_path: Path) -> None:
    source = rows(tmp_path, *({"text": f"film {n}", "stars": n % 2} for n in range(6)))
    data = prepared(
        f"data={source}",
        "zeroth.template={text} {{was}}",
        LABELS,
        "zeroth.label_column=stars",
        "data.eval_fraction=0",
    )
    first = data.train[0]
    assert (first.prompt, first.options, first.gold) == ("film 0 {was}", [" bad", " good"], 0)
    assert [q.gold for q in data.train] == [0, 1, 0, 1, 0, 1]
    assert data.eval == []


def test_labels_of_every_kind_are_found(tmp_path: Path) -> None:
    source = rows(tmp_path, {"t": "a", "label": True}, {"t": "b", "label": "no"}, {"t": "c", "label": 2})
    data = prepared(
        f"data={source}",
        "zeroth.template={t}:",
        'zeroth.labels={true: " x", "no": " y", 2: " z"}',
        "data.eval_fraction=0",
    )
    assert [q.gold for q in data.train] == [0, 1, 2]


def test_a_template_of_an_answer(tmp_path: Path) -> None:
    source = rows(tmp_path, {"q": "2+2", "a": 4}, {"q": "1+1", "a": 2})
    data = prepared(
        f"data={source}", "zeroth.template={q} is", 'zeroth.answer=" {a}."', "data.eval_fraction=0"
    )
    assert [(q.prompt, q.options, q.gold) for q in data.train] == [
        ("2+2 is", [" 4."], 0),
        ("1+1 is", [" 2."], 0),
    ]


def test_rows_that_cannot_be_used_are_counted_or_stop_the_run(tmp_path: Path) -> None:
    good = [{"text": f"film {n}", "label": n % 2} for n in range(4)]
    source = rows(
        tmp_path, *good, {"text": "x", "label": 7}, {"label": 0}, {"text": None, "label": 0}, good[0]
    )
    ours = [f"data={source}", "zeroth.template={text}:", LABELS, "data.eval_fraction=0"]
    report = prepared(*ours).report
    assert report.rows_train == 4
    assert report.dropped == {
        "`label` holds '7'": 1,
        "no column `text`": 1,
        "nothing in column `text`": 1,
        "repeats an earlier row": 1,
    }
    assert report.first_dropped["no column `text`"].endswith("line 6")
    assert any("dropped 1: no column `text`" in line for line in report.lines())
    with pytest.raises(RequestError, match="line 5: `label` holds '7'"):
        prepared(*ours, "data.bad_rows=stop")


def test_a_wrong_column_name_says_which_row_and_what_is_there(tmp_path: Path) -> None:
    source = rows(tmp_path, {"sentence": "a", "label": 0}, {"sentence": "b", "label": 1})
    with pytest.raises(RequestError) as refused:
        prepared(f"data={source}", "zeroth.template={text}:", LABELS)
    text = str(refused.value)
    assert "line 1: no column `text`" in text
    assert "the row has sentence, label" in text


@pytest.mark.parametrize("template", ["{text", "{}:", "{text!r}", "{text:>9}"])
def test_broken_braces_are_refused(tmp_path: Path, template: str) -> None:
    source = rows(tmp_path, {"text": "a", "label": 0}, {"text": "b", "label": 1})
    with pytest.raises(RequestError, match=r"zeroth\.template"):
        prepared(f"data={source}", f"zeroth.template={template}", LABELS)


def test_the_split_is_by_seed_and_keeps_rows_apart(tmp_path: Path) -> None:
    source = rows(tmp_path, *({"text": f"film {n}", "label": n % 2} for n in range(20)))
    ours = [f"data={source}", "zeroth.template={text}:", LABELS, "data.eval_fraction=0.25"]
    data, again, other = prepared(*ours), prepared(*ours), prepared(*ours, "seed=1")
    assert (len(data.train), len(data.eval)) == (15, 5)
    assert not {q.prompt for q in data.train} & {q.prompt for q in data.eval}
    assert data.eval == again.eval
    assert data.eval != other.eval


def test_a_separate_evaluation_source_and_its_overlap(tmp_path: Path) -> None:
    values = [{"text": f"film {n}", "label": n % 2} for n in range(6)]
    source, other = rows(tmp_path, *values[:4]), rows(tmp_path, *values[3:], name="eval.jsonl")
    data = prepared(f"data={source}", f"data.eval_source={other}", "zeroth.template={text}:", LABELS)
    assert (len(data.train), len(data.eval)) == (4, 3)
    assert "overlap in 1 rows" in data.report.notes[0]


def test_a_task_from_the_sample_from_a_folder_and_from_any_file(tmp_path: Path) -> None:
    sample = prepared("zeroth.task=SST-2", "data.source=sample")
    assert sample.task is not None
    assert sample.task.name == "sst2"
    assert sample.train
    assert sample.eval
    assert prepared("zeroth.task=sst2", "data.source=sample", "data.eval_fraction=0").eval == []
    home = tmp_path / "glue" / "sst2"
    home.mkdir(parents=True)
    train = [{"sentence": f"film {n}", "label": n % 2} for n in range(10)]
    rows(home, *train, name="train.jsonl")
    rows(home, *train[:3], name="dev.jsonl")
    folder = prepared("zeroth.task=sst2", f"data={tmp_path / 'glue'}")
    assert (len(folder.train), len(folder.eval)) == (10, 3)
    assert folder.train[0].prompt == "film 0 It was"
    file = prepared("zeroth.task=sst2", f"data={home / 'train.jsonl'}", "data.eval_fraction=0.2")
    assert (len(file.train), len(file.eval)) == (8, 2)
    named = rows(tmp_path, *({"review": r["sentence"], "label": r["label"]} for r in train))
    renamed = prepared(
        "zeroth.task=sst2", f"data={named}", "data.columns={sentence: review}", "data.eval_fraction=0"
    )
    assert renamed.train[0].prompt == "film 0 It was"


def test_a_renamed_column_that_is_not_there_is_not_there(tmp_path: Path) -> None:
    """Neither null nor, where the file has a column of the task's name too, that one in its place."""
    source = rows(tmp_path, *({"review": f"film {n}", "label": n % 2} for n in range(3)))
    with pytest.raises(RequestError, match=r"no column `sentence`[\s\S]*the row has review, label\n"):
        prepared("zeroth.task=sst2", f"data={source}", "data.columns={sentence: text}")
    mixed = rows(
        tmp_path,
        {"review": "film", "sentence": "another text", "label": 1},
        {"sentence": "another text", "label": 0},
    )
    data = prepared(
        "zeroth.task=sst2", f"data={mixed}", "data.columns={sentence: review}", "data.eval_fraction=0"
    )
    assert [q.prompt for q in data.train] == ["film It was"]
    assert data.report.dropped == {"no column `sentence`": 1}
