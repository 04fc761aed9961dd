"""Each declared set, from files with the columns of its copy on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from trimtab.config.schema import DataSettings, VisionSettings
from trimtab.data.picture_prepare import PreparedPictures, prepare_pictures
from trimtab.data.picture_sets import SETS, find_set
from trimtab.data.pictures import PictureRow
from trimtab.errors import RequestError

Encode = Callable[..., bytes]
Write = Callable[..., str]


def prepared(source: str | Path, dataset: str | None = None, **settings: Any) -> PreparedPictures:
    settings = {"bad_rows": "stop", "eval_fraction": 0.0} | settings
    data = DataSettings(source=str(source), **settings)
    return prepare_pictures(data, VisionSettings(dataset=dataset), 0, print)


def asked(row: PictureRow) -> str:
    return str(row.messages[0]["content"][-1]["text"])


@pytest.fixture
def pictures(tmp_path: Path, picture: Encode) -> list[str]:
    """Four pictures of different colours beside the files of rows."""
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(picture((60 * number, 0, 0)))
    return names


def table(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as Parquet, with the pictures as the hub stores them: {bytes, path}."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    held = datasets.Dataset.from_dict(columns)
    held.to_parquet(str(path))
    return str(path)


def test_chartqa_has_a_list_of_one_answer(pictures: list[str], write: Write) -> None:
    rows = [
        {"image": pictures[0], "query": "How many?", "label": ["14"], "human_or_machine": 0},
        {"image": pictures[1], "query": "Which?", "label": "Mexico", "human_or_machine": 1},
    ]
    found = prepared(write(*rows), "chartqa")
    assert [row.answers for row in found.train] == [("14",), ("Mexico",)]
    assert found.train[0].messages == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "14"}]},
    )
    assert found.metric == "relaxed"
    assert found.report.train.unused_columns == ["human_or_machine"]
    assert found.report.train.format_reason == "vision.dataset=chartqa; columns image, query, label"


def test_a_list_that_a_csv_stored_as_text_is_read_back(pictures: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f'image,query,label\n{pictures[0]},How many?,"[\'14\']"\n{pictures[1]},Who?,"[""a""]"\n')
    found = prepared(file, "chartqa")
    assert [row.answers for row in found.train] == [("14",), ("a",)]
    assert found.report.train.changed == {"list of answers that was stored as text": 2}


@pytest.mark.parametrize(("question", "answer"), [("question", "answers"), ("query", "answer")])
def test_infovqa_of_both_namings(question: str, answer: str, pictures: list[str], write: Write) -> None:
    found = prepared(write({"image": pictures[0], question: "Share?", answer: ["12%", "12"]}), "infovqa")
    assert found.train[0].answers == ("12%", "12")
    assert found.metric == "anls"


def test_docvqa_from_parquet_with_bytes(picture: Encode, tmp_path: Path) -> None:
    held = {"bytes": picture(), "path": "page.png"}
    rows = [
        {"questionId": "1", "question": "Date?", "image": held, "answers": ["1 May", "May 1"], "docId": 4}
    ]
    found = prepared(table(tmp_path / "validation.parquet", rows), "docvqa")
    row = found.train[0]
    assert row.answers == ("1 May", "May 1")
    assert row.pictures[0].open().getpixel((0, 0)) == (200, 30, 60)
    assert row.pictures[0].where.endswith("validation.parquet, row 1 (page.png)")
    assert found.metric == "anls"


def test_ocrvqa_is_a_row_for_each_question(pictures: list[str], write: Write) -> None:
    rows = [
        {"image": pictures[0], "questions": ["Who wrote it?", "What genre?"], "answers": ["Poe", "Tales"]},
        {"image": pictures[1], "questions": ["Is it a book?"], "answers": ["Yes"]},
    ]
    found = prepared(write(*rows), "ocrvqa")
    assert [(asked(row), row.answers) for row in found.train] == [
        ("Who wrote it?", ("Poe",)),
        ("What genre?", ("Tales",)),
        ("Is it a book?", ("Yes",)),
    ]
    assert found.train[1].where.endswith("rows.jsonl, line 1, question 2")
    assert found.report.train.notes == ["2 rows hold 3 questions, a row each"]
    assert found.metric == "exact"


def test_ocrvqa_with_more_questions_than_answers_names_the_row(pictures: list[str], write: Write) -> None:
    uneven = {"image": pictures[0], "questions": ["a?", "b?"], "answers": ["a"]}
    empty = {"image": pictures[2], "questions": ["a?", "b?"], "answers": ["a", ""]}
    none = {"image": pictures[3], "questions": None, "answers": ["a"]}
    file = write({"image": pictures[1], "questions": ["a?"], "answers": ["a"]}, uneven, empty, none)
    with pytest.raises(RequestError, match=r"rows\.jsonl, line 2: 2 in `questions` and 1 in `answers`"):
        prepared(file, "ocrvqa")
    found = prepared(file, "ocrvqa", bad_rows="drop")
    assert [asked(row) for row in found.train] == ["a?", "a?"]
    assert found.report.train.dropped == {
        "2 in `questions` and 1 in `answers`": 1,
        "`answers` is empty": 1,
        "`questions` or `answers` is not a list": 1,
    }
    assert found.report.train.first_dropped["`answers` is empty"].endswith("line 3, question 2")


def test_textvqa_trains_on_what_most_people_said(pictures: list[str], write: Write) -> None:
    said = ["nokia", "NOKIA", "nokia", "nokia", "toshiba", "nokia", "nokia", "nokia", "nokia", "x"]
    said = ["toshiba", *said[:-1]]
    found = prepared(write({"image": pictures[0], "question": "Brand?", "answers": said}), "textvqa")
    row = found.train[0]
    assert row.answers[0] == "nokia"
    assert sorted(row.answers) == sorted(said)
    assert row.messages[-1]["content"] == [{"type": "text", "text": "nokia"}]
    assert found.metric == "soft"


def test_ai2d_asks_with_the_options(pictures: list[str], write: Write) -> None:
    rows = [
        {"image": pictures[0], "question": "What is B?", "options": ["leaf", "root"], "answer": "1"},
        {"image": pictures[1], "question": "What is C?", "options": ["leaf", "root"], "answer": "2"},
        {"image": pictures[2], "question": "What is D?", "options": [], "answer": "0"},
    ]
    found = prepared(write(*rows), "ai2d", bad_rows="drop")
    (row,) = found.train
    assert asked(row) == "What is B?\nA. leaf\nB. root\nAnswer with the letter of the right option."
    assert row.answers == ("B",)
    assert found.metric == "exact"
    assert found.report.train.dropped == {
        "`answer` is '2', no place among 2 options": 1,
        "`options` is not a list of options": 1,
    }


def vqa_answers(*said: str) -> list[dict[str, Any]]:
    return [{"answer": a, "answer_confidence": "yes", "answer_id": n} for n, a in enumerate(said, 1)]


def test_vqav2_flattened_as_on_the_hub(pictures: list[str], write: Write) -> None:
    answers = vqa_answers("down", "table", "down")
    row = {"image": pictures[0], "question": "Where?", "answers": answers, "multiple_choice_answer": "down"}
    found = prepared(write(row), "vqav2")
    assert found.train[0].answers == ("down", "down", "table")
    assert found.metric == "soft"


def test_vqav2_as_its_authors_give_it(tmp_path: Path, picture: Encode) -> None:
    (tmp_path / "val2014").mkdir()
    for number in (42, 262148):
        (tmp_path / "val2014" / f"COCO_val2014_{number:012d}.jpg").write_bytes(
            picture((number % 255, 0, 0), "JPEG")
        )
    questions = [
        {"image_id": 262148, "question": "Where is he looking?", "question_id": 262148000},
        {"image_id": 42, "question": "What colour?", "question_id": 42001},
        {"image_id": 7, "question": "No picture?", "question_id": 7000},
        {"image_id": 42, "question": "No answer?", "question_id": 42002},
    ]
    notes = [
        {
            "question_id": 42001,
            "image_id": 42,
            "answers": vqa_answers("red"),
            "multiple_choice_answer": "red",
        },
        {"question_id": 262148000, "image_id": 262148, "answers": vqa_answers("down", "at table", "down")},
        {"question_id": 7000, "image_id": 7, "answers": vqa_answers("x")},
    ]
    names = ("v2_OpenEnded_mscoco_val2014_questions.json", "v2_mscoco_val2014_annotations.json")
    for name, key, rows in zip(names, ("questions", "annotations"), (questions, notes), strict=True):
        (tmp_path / name).write_text(
            json.dumps({"info": {"year": 2014}, "data_subtype": "val2014", key: rows})
        )
    found = prepared(tmp_path, "vqav2", split="val", bad_rows="drop")
    assert [(asked(row), row.answers[0]) for row in found.train] == [
        ("Where is he looking?", "down"),
        ("What colour?", "red"),
    ]
    assert found.report.train.dropped == {"picture is not there": 1, "`answers` is null": 1}
    assert "COCO's picture 7" in found.report.train.first_dropped["picture is not there"]
    with pytest.raises(RequestError, match="questions are there of validation, annotations of validation"):
        prepared(tmp_path, "vqav2", split="train")


def test_a_split_that_the_hub_copy_lacks_lists_those_it_has(pictures: list[str], write: Write) -> None:
    with pytest.raises(RequestError, match=r"train, val, test there\n.*set data\.split=val$"):
        prepared("HuggingFaceM4/ChartQA", split="validation")
    with pytest.raises(RequestError, match=r"ai2d has the splits test there"):
        prepared("lmms-lab/ai2d")
    own = write({"image": pictures[0], "query": "a?", "label": "b"})
    with pytest.raises(RequestError, match=r"write data\.eval_source: HuggingFaceM4/ChartQA\[val\]"):
        prepared(own, "chartqa", eval_source="HuggingFaceM4/ChartQA[validation]")


def test_a_hub_id_says_which_set_it_is() -> None:
    for known in SETS.values():
        for home in known.homes:
            assert find_set(home.id, home.subset, None) == (known, home)
            assert find_set(home.id, home.subset, known.name) == (known, home)
    assert find_set("somebody/their-copy", None, None) is None
    assert find_set("somebody/their-copy", None, "chartqa") == (SETS["chartqa"], None)
    assert find_set("lmms-lab/DocVQA", None, "infovqa") == (SETS["infovqa"], SETS["infovqa"].homes[0])
    with pytest.raises(RequestError, match=r"data\.subset=InfographicVQA \(infovqa\) or data\.subset=DocVQA"):
        find_set("lmms-lab/DocVQA", None, None)
    with pytest.raises(RequestError, match="the set has no such part"):
        find_set("lmms-lab/DocVQA", "SlideVQA", None)


def test_a_missing_column_lists_what_is_there(pictures: list[str], write: Write) -> None:
    with pytest.raises(RequestError) as raised:
        prepared(write({"img": pictures[0], "query": "a?", "text": "b"}), "chartqa")
    said = str(raised.value)
    assert "line 1: no column `image` and `label` (columns: img, query, text)" in said
    assert "chartqa has image and query and label, or image and question and answer" in said
    assert "data.columns.image=<column> data.columns.label=<column>" in said


def test_columns_are_mapped_to_the_sets_own(pictures: list[str], write: Write) -> None:
    file = write({"img": pictures[0], "query": "a?", "gold": ["b"]})
    found = prepared(file, "chartqa", columns={"image": "img", "label": "gold"})
    assert found.train[0].answers == ("b",)
    with pytest.raises(RequestError, match="chartqa has no column `picture`"):
        prepared(file, "chartqa", columns={"picture": "img"})


def test_a_row_without_a_column_among_others_is_named(pictures: list[str], write: Write) -> None:
    file = write(
        {"image": pictures[0], "query": "a?", "label": ["b"]}, {"image": pictures[1], "label": ["b"]}
    )
    with pytest.raises(RequestError, match=r"line 2: no column `query` \(columns: image, label\)"):
        prepared(file, "chartqa")
    assert prepared(file, "chartqa", bad_rows="drop").report.rows_train == 1


def test_a_hub_set_leaves_its_pictures_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Encode
) -> None:
    # As `tests/data/test_sources.py` does: a cached set is made by loading a file and renaming it.
    rows = {"image": [{"bytes": picture((n * 50, 0, 0)), "path": None} for n in range(4)]}
    rows |= {"query": [f"q{n}?" for n in range(4)], "label": [[str(n)] for n in range(4)]}
    features = datasets.Features(
        image=datasets.Image(), query=datasets.Value("string"), label=datasets.List(datasets.Value("string"))
    )
    file = tmp_path / "val.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(file))
    datasets.load_dataset("parquet", data_files={"val": str(file)}, cache_dir=str(tmp_path))
    (info,) = (tmp_path / "parquet").rglob("dataset_info.json")
    folder = tmp_path / "HuggingFaceM4___chart_qa" / "default" / "0.0.0" / "abcdef"
    folder.parent.mkdir(parents=True)
    info.parent.rename(folder)
    (folder / "parquet-val.arrow").rename(folder / "chart_qa-val.arrow")
    known = json.loads((folder / "dataset_info.json").read_text())
    known |= {"builder_name": "chart_qa", "dataset_name": "chart_qa", "config_name": "default"}
    (folder / "dataset_info.json").write_text(json.dumps(known))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    found = prepared("HuggingFaceM4/ChartQA", split="val")
    assert [row.answers for row in found.train] == [("0",), ("1",), ("2",), ("3",)]
    held = [row.pictures[0] for row in found.train]
    assert [one.open().getpixel((0, 0)) for one in held] == [(n * 50, 0, 0) for n in range(4)]
    assert held[2].where == "HuggingFaceM4/ChartQA[val], row 3 (`image`)"
    assert not any(isinstance(one.source, bytes) for one in held)
    assert found.report.train.format_reason.startswith(
        "data.source=HuggingFaceM4/ChartQA; columns image, query"
    )


def test_real_charts(shared_data: Path) -> None:
    file = shared_data / "chartqa" / "val.jsonl"
    if not file.is_file():
        pytest.skip("no ChartQA beside the checkout")
    found = prepared(file, "chartqa", eval_fraction=0.2, max_rows=60)
    assert found.eval is not None
    assert len(found.train) + len(found.eval) == 60
    assert all("[" not in row.answers[0] for row in found.train)
    assert not {p.source for r in found.train for p in r.pictures} & {
        p.source for r in found.eval for p in r.pictures
    }
    assert found.train[0].pictures[0].open().mode == "RGB"
