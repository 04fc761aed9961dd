"""Where rows come from, decided by looks; and what is said when nothing is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from trimtab.config.schema import DataSettings
from trimtab.data.sources import Loaded, encoded_rows, load_rows
from trimtab.errors import RequestError

Write = Callable[..., str]
ROW = json.dumps({"text": "hello"}) + "\n"


def load(source: str | Path, **settings: object) -> Loaded:
    return load_rows(str(source), DataSettings(source=str(source), **settings))


def names(loaded: Loaded) -> list[str]:
    return [Path(name).name for name in loaded.files]


def test_the_built_in_set_is_the_shipped_file() -> None:
    loaded = load("device-errors")
    assert len(loaded.rows) >= 100
    assert all(row.values["instruction"].strip() and row.values["output"].strip() for row in loaded.rows)
    assert loaded.source == "device-errors (built in)"


def test_a_file_and_max_rows(write: Write) -> None:
    path = write(*({"text": str(i)} for i in range(5)))
    assert [row.values["text"] for row in load(path, max_rows=2).rows] == ["0", "1"]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "notes.md", "dataset_info.json", ".hidden.jsonl"):
        (tmp_path / name).write_text(ROW)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.jsonl").write_text(ROW)
    assert names(load(tmp_path)) == ["a.json", "b.jsonl", "c.jsonl"]


def test_a_folder_with_splits_keeps_them_apart(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "val.jsonl"):
        (tmp_path / name).write_text(ROW)
    loaded = load(tmp_path)
    assert names(loaded) == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert loaded.notes == ["data.split=train left out test.jsonl, val.jsonl"]
    assert names(load(tmp_path, split="validation")) == ["val.jsonl"]
    with pytest.raises(RequestError, match="no file of the split `holdout`"):
        load(tmp_path, split="holdout")


def test_a_folder_without_rows_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(RequestError, match=r"no file with rows \(it holds \.txt\)"):
        load(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(RequestError, match=r"data\.source=.*: no rows"):
        load(tmp_path / "a.jsonl")


def test_a_missing_path_names_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "alpaca.jsonl").write_text(ROW)
    with pytest.raises(RequestError, match=r"did you mean .*alpaca\.jsonl\?"):
        load(tmp_path / "alpacca.jsonl")


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the folder .*nowhere, which is not there either"):
        load(tmp_path / "nowhere" / "x.jsonl")


def test_a_near_built_in_name() -> None:
    with pytest.raises(RequestError, match=r"did you mean device-errors\?") as raised:
        load("device-error")
    assert "a built-in set" in str(raised.value)


def test_a_relative_path_with_one_slash_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text(ROW)
    assert names(load("data/rows.jsonl")) == ["rows.jsonl"]
    with pytest.raises(RequestError, match=r"did you mean data/rows\.jsonl\?"):
        load("data/row.jsonl")


def test_a_hub_id_that_cannot_be_loaded_names_both_readings() -> None:
    with pytest.raises(RequestError, match="no such file or folder here, and as a hub id") as raised:
        load("nobody-here/no-such-set")
    assert raised.value.exit_code == 2


def test_a_hub_set_from_the_hub_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    # Offline, `datasets` serves what was downloaded before. A cached set is made by loading a file and renaming it.
    path = write({"question": "q0", "answer": "a0"}, {"question": "q1", "answer": "a1"})
    datasets.load_dataset("json", data_files={"train": path}, cache_dir=str(tmp_path))
    (info,) = (tmp_path / "json").rglob("dataset_info.json")
    folder = tmp_path / "acme___quiz" / "default" / "0.0.0" / "abcdef"
    folder.parent.mkdir(parents=True)
    info.parent.rename(folder)
    (folder / "json-train.arrow").rename(folder / "quiz-train.arrow")
    known = json.loads((folder / "dataset_info.json").read_text())
    known |= {"builder_name": "quiz", "dataset_name": "quiz", "config_name": "default"}
    (folder / "dataset_info.json").write_text(json.dumps(known))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    loaded = load("acme/quiz", max_rows=1)
    assert [row.values for row in loaded.rows] == [{"question": "q0", "answer": "a0"}]
    assert loaded.rows[0].where == "acme/quiz[train], row 1"
    with pytest.raises(RequestError, match=r'Unknown split "test"(.|\n)*data\.split \(test\)'):
        load("acme/quiz", split="test")


def test_an_address_of_another_kind() -> None:
    with pytest.raises(RequestError, match="a gs:// address"):
        load("gs://bucket/key.jsonl")


def test_local_data_asks_for_no_credentials(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    assert len(load(write({"text": "a"}), endpoint_url="http://127.0.0.1:9").rows) == 1


def test_pictures_of_a_table_stay_in_it() -> None:
    held = [{"bytes": b"not opened", "path": None}, None]
    features = datasets.Features(image=datasets.Image(), pages=datasets.List(datasets.Image()))
    table = datasets.Dataset.from_dict({"image": held, "pages": [held[:1], []]}, features=features)
    rows = encoded_rows(table, "acme/quiz[train]")
    assert [row.where for row in rows] == ["acme/quiz[train], row 1", "acme/quiz[train], row 2"]
    assert [row.values["image"].value() for row in rows] == held
    assert [row.values["pages"] for row in rows] == [held[:1], []]
    alone = encoded_rows(table.select_columns(["image"]), "x")
    assert [list(row.values) for row in alone] == [["image"], ["image"]]
