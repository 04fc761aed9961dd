"""Rows with pictures, prepared: what is dropped, what is held out, what is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trimtab.config.load import load_config
from trimtab.config.schema import DataSettings, VisionSettings
from trimtab.data.picture_check import groups
from trimtab.data.picture_prepare import BUILT_IN, BuiltIn, PreparedPictures, prepare_pictures
from trimtab.data.pictures import Picture, PictureRow, asked
from trimtab.errors import RequestError

Encode = Callable[..., bytes]
Write = Callable[..., str]


def prepared(
    source: str, *, seed: int = 0, vision: dict[str, Any] | None = None, **settings: Any
) -> PreparedPictures:
    data = DataSettings(source=source, **{"eval_fraction": 0.0} | settings)
    return prepare_pictures(data, VisionSettings(**vision or {}), seed, print)


def contents(rows: list[PictureRow] | None) -> set[bytes]:
    return {picture.read() for row in rows or [] for picture in row.pictures}


@pytest.fixture
def album(tmp_path: Path, picture: Encode, write: Write) -> str:
    """Thirty questions on ten pictures; half of the rows name a picture by a second file of the same bytes."""
    rows = []
    for number in range(10):
        for copy in ("a", "b"):
            (tmp_path / f"{copy}{number}.png").write_bytes(picture((number * 20, 0, 0)))
        for turn in range(3):
            name = f"{'ab'[turn % 2]}{number}.png"
            rows.append({"image": name, "question": f"Question {turn}?", "answer": str(number)})
    return write(*rows)


def test_a_picture_is_never_on_both_sides(album: str) -> None:
    for seed in range(5):
        found = prepared(album, eval_fraction=0.2, seed=seed)
        assert (len(found.train), len(found.eval or [])) == (24, 6)
        assert not contents(found.train) & contents(found.eval)
    assert found.report.split == "data.eval_fraction=0.2, seed 4, by picture"
    assert found.report.pictures == 10


def test_the_split_is_by_seed_and_not_by_order(album: str, tmp_path: Path) -> None:
    lines = Path(album).read_text().splitlines()
    turned = tmp_path / "turned.jsonl"
    turned.write_text("\n".join(reversed(lines)))
    one, other = (prepared(str(source), eval_fraction=0.2, seed=3) for source in (album, turned))
    assert {row.key for row in one.eval or []} == {row.key for row in other.eval or []}
    assert contents(one.eval) != contents(prepared(album, eval_fraction=0.2, seed=4).eval)


def test_rows_that_share_a_picture_through_others_stay_together() -> None:
    rows = [asked("?", (str(n),), (), "x", key=f"key {n}") for n in range(5)]
    digests = [frozenset("ab"), frozenset("cd"), frozenset("bc"), frozenset("e"), frozenset()]
    assert groups(rows, digests) == ["a", "a", "a", "e", "key 4"]
    assert groups(rows[::-1], digests[::-1]) == ["key 4", "e", "a", "a", "a"]


def test_one_picture_cannot_be_split(tmp_path: Path, picture: Encode, write: Write) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    rows = [{"image": "a.png", "question": f"{n}?", "answer": "x"} for n in range(5)]
    with pytest.raises(RequestError, match="all 5 rows hang together by their pictures"):
        prepared(write(*rows), eval_fraction=0.5)


def test_a_row_that_repeats_another_is_dropped_by_content(album: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(album).read_text().splitlines()]
    again = {**rows[0], "image": "b0.png", "id": 99}
    other = {**rows[0], "answer": "another"}
    file = tmp_path / "more.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*rows, again, other]))
    found = prepared(str(file))
    assert found.report.train.dropped == {"repeats an earlier row": 1}
    assert found.report.train.first_dropped["repeats an earlier row"].endswith("line 31")
    assert len(prepared(str(file), keep_duplicates=True).train) == 32
    assert len({row.key for row in found.train}) == 31


def test_an_evaluation_source_that_shares_pictures_is_told(
    album: str, tmp_path: Path, picture: Encode, write: Write
) -> None:
    (tmp_path / "new.png").write_bytes(picture((1, 2, 3)))
    rows = [{"image": name, "question": "New?", "answer": "x"} for name in ("new.png", "a3.png")]
    held = write(*rows, name="held.jsonl")
    found = prepared(album, eval_source=held)
    assert len(found.eval or []) == 2
    assert found.report.split == f"data.eval_source={held}"
    assert found.report.notes == [
        "data.eval_source and data.source share 1 picture: what is evaluated was seen in training"
    ]
    assert found.report.pictures == 11


def test_a_folder_with_splits_is_trained_on_one_and_evaluated_on_another(
    tmp_path: Path, picture: Encode
) -> None:
    for number, split in enumerate(("train", "val")):
        (tmp_path / f"{split}.png").write_bytes(picture((number, 0, 0)))
        row = {"image": f"{split}.png", "question": f"{split}?", "answer": "x"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    found = prepared(str(tmp_path), eval_source=f"{tmp_path}[val]")
    assert [row.messages[0]["content"][1]["text"] for row in found.train] == ["train?"]
    assert [row.messages[0]["content"][1]["text"] for row in found.eval or []] == ["val?"]
    assert found.report.notes == []


def test_max_rows_and_a_metric_of_ones_own(album: str) -> None:
    found = prepared(album, max_rows=4, vision={"metric": "anls"})
    assert len(found.train) == 4
    assert found.metric == found.report.metric == "anls"


def test_pictures_may_be_left_unopened(album: str, tmp_path: Path) -> None:
    (tmp_path / "a9.png").write_bytes((tmp_path / "a9.png").read_bytes()[:50])
    with pytest.raises(RequestError, match=r"line 28 \(a9\.png\): picture is (damaged|none of)"):
        prepared(album, bad_rows="stop")
    found = prepared(album, bad_rows="stop", vision={"check_pictures": False})
    assert len(found.train) == 30
    assert "pictures: 11 different, not decoded before (vision.check_pictures=false)" in found.report.lines()
    with pytest.raises(RequestError, match=r"line 28 \(a9\.png\): picture is (damaged|none of)"):
        found.train[27].pictures[0].open()
    (tmp_path / "a8.png").unlink()
    with pytest.raises(RequestError, match=r"line 25 \(a8\.png\): picture is not there"):
        prepared(album, bad_rows="stop", vision={"check_pictures": False})


def test_the_largest_picture_is_a_setting_that_reaches_the_rows(album: str) -> None:
    found = prepared(album, vision={"max_pixels": 48})
    assert {picture.most_pixels for row in found.train for picture in row.pictures} == {48}
    with pytest.raises(
        RequestError, match=r"none of its 30 rows can be trained on\n.*30 picture declares 8 × 6"
    ):
        prepared(album, vision={"max_pixels": 47})


def test_the_report_accounts_for_every_row(album: str, tmp_path: Path) -> None:
    (tmp_path / "a0.png").unlink()
    with Path(album).open("a") as file:
        file.write('{"image": "a1.png", "question": "?", "answer": ""}\n')
    found = prepared(album, bad_rows="drop", eval_fraction=0.1)
    lines = found.report.lines()
    assert f"data: {album} (local file)" in lines
    assert "  format: question_answer (columns image, question, answer)" in lines
    assert "  rows: 31 read, 28 kept" in lines
    assert f"    dropped 2: picture is not there (first: {album}, line 1 (a0.png))" in lines
    assert f"    dropped 1: `answer` is empty (first: {album}, line 31)" in lines
    assert "pictures: 10 different, every one decoded whole" in lines
    assert "answers scored by: exact" in lines
    told = json.loads(json.dumps(found.report.as_dict()))
    assert told["train"]["dropped"] == {"picture is not there": 2, "`answer` is empty": 1}
    assert told["rows_train"] + told["rows_eval"] == 28


def test_a_built_in_source_brings_its_own_held_out_rows(
    monkeypatch: pytest.MonkeyPatch, picture: Encode
) -> None:
    def draw(split: str, number: int, seed: int) -> list[PictureRow]:
        first = 0 if split == "train" else 100
        return [
            asked(
                "Which?", (str(n),), (Picture(picture((first + n, seed, 0)), f"{split} {n}"),), f"{split} {n}"
            )
            for n in range(number)
        ]

    monkeypatch.setitem(BUILT_IN, "drawn-here", BuiltIn(draw, train=20, eval=5))
    found = prepared("drawn-here", eval_fraction=0.1)
    assert (len(found.train), len(found.eval or [])) == (20, 5)
    assert not contents(found.train) & contents(found.eval)
    assert found.report.split == "the set's own held-out pictures"
    assert prepared("drawn-here").eval is None
    assert len(prepared("drawn-here", max_rows=3).train) == 3


def test_stop_is_the_word_and_error_still_means_it(tmp_path: Path) -> None:
    assert DataSettings(bad_rows="error").bad_rows == "stop"
    assert DataSettings(bad_rows="stop").bad_rows == "stop"
    file = tmp_path / "run.yaml"
    file.write_text("data: {bad_rows: error}\n")
    assert load_config(file).data.bad_rows == "stop"
    with pytest.raises(ValueError, match="'drop' or 'stop'"):
        DataSettings(bad_rows="ignore")


def test_pil_is_left_as_it_was(album: str) -> None:
    before = Image.MAX_IMAGE_PIXELS
    prepared(album)
    assert before == Image.MAX_IMAGE_PIXELS
