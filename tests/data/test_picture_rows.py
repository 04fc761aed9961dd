"""One's own rows with pictures: every layout, every way to give a picture, and what is said of those that fit none."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from trimtab.config.schema import DataSettings, VisionSettings
from trimtab.data.picture_prepare import PreparedPictures, prepare_pictures
from trimtab.data.pictures import PictureRow
from trimtab.errors import RequestError

Encode = Callable[..., bytes]
Write = Callable[..., str]
RED = (200, 30, 60)


def prepared(source: str | Path, **settings: Any) -> PreparedPictures:
    settings = {"bad_rows": "stop", "eval_fraction": 0.0} | settings
    return prepare_pictures(DataSettings(source=str(source), **settings), VisionSettings(), 0, print)


def only(source: str | Path, **settings: Any) -> PictureRow:
    (row,) = prepared(source, **settings).train
    return row


def colour(row: PictureRow, number: int = 0) -> Any:
    return row.pictures[number].open().getpixel((0, 0))


@pytest.fixture
def red(tmp_path: Path, picture: Encode) -> str:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(picture(RED))
    (tmp_path / "pictures" / "blue.png").write_bytes(picture((0, 0, 255)))
    return "pictures/red.png"


BLUE = "pictures/blue.png"
USER_RED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}


def test_columns_of_ones_own_are_mapped(red: str, write: Write) -> None:
    file = write({"img": red, "q": "What?", "a": "red", "id": 7})
    found = prepared(file, columns={"image": "img", "question": "q", "answer": "a"})
    (row,) = found.train
    assert row.messages == (USER_RED, ANSWER)
    assert row.answers == ("red",)
    assert colour(row) == RED
    assert found.metric == "exact"
    about = found.report.train
    assert (about.format, about.unused_columns) == ("question_answer", ["id"])
    assert about.format_reason == "columns image (=img), question (=q), answer (=a)"


def test_without_the_mapping_the_error_tells_it(red: str, write: Write) -> None:
    with pytest.raises(RequestError) as raised:
        prepared(write({"img": red, "q": "What?", "a": "red"}))
    assert "line 1: no format fits its columns (img, q, a)" in str(raised.value)
    assert "set data.columns.image=img data.columns.question=q data.columns.answer=a" in str(raised.value)


def test_a_list_of_answers_accepts_each_and_trains_on_the_first(red: str, write: Write) -> None:
    assert only(write({"image": red, "question": "What?", "answer": ["red", "crimson", 3]})).answers == (
        "red",
        "crimson",
        "3",
    )


def test_several_pictures_in_one_row(red: str, write: Write) -> None:
    row = only(write({"image": [red, BLUE], "question": "What?", "answer": "both"}))
    assert [part["type"] for part in row.messages[0]["content"]] == ["image", "image", "text"]
    assert [colour(row, 0), colour(row, 1)] == [RED, (0, 0, 255)]


@pytest.mark.parametrize("kind", ["relative", "absolute", "file", "data", "base64", "object", "wrapped"])
def test_every_way_to_give_a_picture(kind: str, red: str, tmp_path: Path, write: Write) -> None:
    data = (tmp_path / red).read_bytes()
    text = base64.b64encode(data).decode()
    value = {
        "relative": red,
        "absolute": str(tmp_path / red),
        "file": (tmp_path / red).as_uri(),
        "data": f"data:image/png;base64,{text}",
        "base64": text,
        "object": {"path": red, "bytes": None},
        "wrapped": "\n".join(text[n : n + 60] for n in range(0, len(text), 60)),
    }[kind]
    assert colour(only(write({"image": value, "question": "What?", "answer": "red"}))) == RED


def test_bytes_in_parquet_bare_and_as_the_hub_stores_them(tmp_path: Path, picture: Encode) -> None:
    for number, held in enumerate((picture(RED), {"bytes": picture(RED), "path": "a.png"})):
        file = tmp_path / f"{number}.parquet"
        rows = {"image": [held], "question": ["What?"], "answer": ["red"]}
        datasets.Dataset.from_dict(rows).to_parquet(str(file))
        assert colour(only(file)) == RED


def test_openai_messages(red: str, tmp_path: Path, write: Write) -> None:
    url = "data:image/png;base64," + base64.b64encode((tmp_path / red).read_bytes()).decode()
    parts = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "red"},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": BLUE}, {"type": "text", "text": "And?"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "blue"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": red}]},
    ]
    found = prepared(write({"messages": messages}))
    (row,) = found.train
    assert [message["role"] for message in row.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert row.messages[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert row.messages[1]["content"] == [{"type": "text", "text": "What?"}, {"type": "image"}]
    assert row.answers == ("blue",)
    assert len(row.pictures) == 2
    assert [colour(row, 0), colour(row, 1)] == [RED, (0, 0, 255)]
    assert found.report.train.changed == {"conversation cut after its last answer": 1}


@pytest.mark.parametrize("key", ["image", "path", "url"])
def test_messages_of_hugging_face(key: str, red: str, write: Write) -> None:
    parts = [{"type": "image", key: red}, {"type": "text", "text": "What?"}]
    row = only(
        write({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]})
    )
    assert row.messages == (USER_RED, ANSWER)
    assert colour(row) == RED


def test_messages_with_the_pictures_in_a_column_beside(red: str, write: Write) -> None:
    bare = [USER_RED, ANSWER]
    assert colour(only(write({"messages": bare, "images": [red]}))) == RED
    marked = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "red"}]
    row = only(write({"messages": marked, "images": [red]}))
    assert row.messages == (USER_RED, ANSWER)
    with pytest.raises(RequestError, match="places for pictures in `messages`: 1; pictures beside it: 2"):
        prepared(write({"messages": bare, "images": [red, BLUE]}))
    with pytest.raises(RequestError, match="places for pictures in `messages`: 1; pictures beside it: 0"):
        prepared(write({"messages": bare}))


def test_llava_conversations(red: str, write: Write) -> None:
    talk = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "red"},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Yes."},
    ]
    row = only(write({"id": 1, "image": red, "conversations": talk}))
    assert row.messages[:2] == (USER_RED, ANSWER)
    assert row.answers == ("Yes.",)
    between = [
        {"from": "human", "value": "Is <image> or\n<image> red?"},
        {"from": "gpt", "value": "The first"},
    ]
    row = only(write({"image": [red, BLUE], "conversations": between}))
    kinds = [part.get("text", "*") for part in row.messages[0]["content"]]
    assert kinds == ["Is ", "*", " or", "*", " red?"]
    missing = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "red"}]
    with pytest.raises(
        RequestError, match="places for pictures in `conversations`: 0; pictures beside it: 1"
    ):
        prepared(write({"image": red, "conversations": missing}))


def test_rows_of_text_alone_are_allowed_among_conversations(red: str, write: Write) -> None:
    plain = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    talk = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    found = prepared(write({"conversations": plain}, {"image": red, "conversations": talk}))
    assert [len(row.pictures) for row in found.train] == [0, 1]


def test_a_folder_with_a_metadata_file(tmp_path: Path, picture: Encode) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "red.png").write_bytes(picture(RED, size=(9, 9) if split == "test" else (8, 8)))
        (tmp_path / split / "metadata.csv").write_text(
            f"file_name,question,answer\nred.png,What {split}?,red\n"
        )
    row = only(tmp_path)
    assert row.messages[0]["content"][1]["text"] == "What train?"
    assert colour(row) == RED
    found = prepared(tmp_path, split="test")
    assert found.train[0].messages[0]["content"][1]["text"] == "What test?"
    assert found.report.train.notes == ["data.split=test left out train/"]
    with pytest.raises(RequestError, match="the folders there are test, train"):
        prepared(tmp_path, split="validation")


def test_a_folder_with_a_text_beside_each_picture(tmp_path: Path, picture: Encode) -> None:
    for name, tone in (("a", RED), ("b", (0, 0, 255))):
        (tmp_path / f"{name}.jpg").write_bytes(picture(tone, "JPEG"))
    with pytest.raises(RequestError, match=r"2 pictures and no text \(a\.jpg, b\.jpg\)"):
        prepared(tmp_path)
    (tmp_path / "a.txt").write_text("something red\n")
    with pytest.raises(RequestError, match=r", picture 2: `text` is null"):
        prepared(tmp_path)
    (tmp_path / "b.txt").write_text("something blue")
    rows = prepared(tmp_path).train
    assert [row.answers for row in rows] == [("something red",), ("something blue",)]
    assert rows[0].messages[0] == {"role": "user", "content": [{"type": "image"}]}


def test_a_path_that_leads_out_of_the_folder_is_refused_unless_allowed(red: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "pictures" / "red.png")
    (folder / "links").symlink_to(tmp_path / "pictures")
    file = folder / "rows.jsonl"
    absolute = str(tmp_path / "pictures" / "red.png")
    for told in ("../pictures/red.png", absolute, f"file://{absolute}", "link.png", "links/red.png"):
        file.write_text(json.dumps({"image": told, "question": "What?", "answer": "red"}) + "\n")
        with pytest.raises(
            RequestError, match=rf"line 1: picture .* leads out .*\n.*\n.*media_root={tmp_path}/pict"
        ):
            prepared(file)
        for root in (tmp_path / "pictures", "/"):
            assert len(prepared(file, media_root=str(root)).train) == 1
        if told in ("../pictures/red.png", absolute):  # inside of the folder that is given
            assert len(prepared(tmp_path, split="train").train) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image": "no.png"}, r" \(no\.png\): picture is not there"),
        ({"image": None}, ": `image` is null"),
        ({"image": ""}, ": `image` is empty"),
        ({"image": 7}, ": `image` is a int, not a path, bytes or base64"),
        ({"image": {"width": 3}}, r": `image` is an object without a picture \(it has width\)"),
        ({"image": "https://example.org/a.png"}, ": `image` is a https address; download the pictures"),
        ({"image": "data:image/png;base64,####"}, ": `image` is a data: URL whose base64 is broken"),
        ({"image": "data:image/png,abc"}, ": `image` is a data: URL without"),
        ({"question": None}, ": `question` is null"),
        ({"question": "  "}, ": `question` is empty"),
        ({"answer": None}, ": `answer` is null"),
        ({"answer": ""}, ": `answer` is empty"),
        ({"answer": []}, ": `answer` is empty"),
        ({"answer": ["", None]}, ": `answer` is empty"),
        ({"answer": {"a": 1}}, ": `answer` holds an object without `answer`"),
        ({"image": "text.png"}, r" \(text\.png\): picture is none of PNG, JPEG"),
        ({"image": "empty.png"}, r" \(empty\.png\): picture is empty \(0 bytes\)"),
        ({"image": "half.png"}, r" \(half\.png\): picture is damaged"),
    ],
)
def test_a_bad_row_is_named_or_dropped_and_counted(
    change: dict[str, Any], reason: str, red: str, tmp_path: Path, write: Write
) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 99).save(whole, "PNG")
    (tmp_path / "half.png").write_bytes(whole.getvalue()[:1500])
    good = {"image": red, "question": "What?", "answer": "red"}
    file = write(good, good | change)
    with pytest.raises(
        RequestError, match=f"rows.jsonl, line 2{reason}(.|\n)*data.bad_rows=stop stops at the first"
    ):
        prepared(file)
    found = prepared(file, bad_rows="drop")
    assert len(found.train) == 1
    ((why, number),) = found.report.train.dropped.items()
    assert number == 1
    assert "line 2" in found.report.train.first_dropped[why]
    assert any(f"dropped 1: {why}" in line for line in found.report.lines())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no answer"),
        (None, "`messages` is null"),
        ([USER_RED], "no answer"),
        ([ANSWER], "no user message"),
        ([USER_RED, {"role": "assistant", "content": ""}], "empty answer"),
        ([{"role": "user", "content": []}, ANSWER], "empty user message"),
        ([{"content": "x"}, ANSWER], "a message in `messages` has no role"),
        ([USER_RED, {"role": "tool", "content": "x"}, ANSWER], "a message of the role `tool`"),
        ([USER_RED, {"role": "assistant", "content": [{"type": "image"}]}], "a picture inside an answer"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ANSWER],
            "content part of kind video",
        ),
        ([USER_RED, ANSWER | {"weight": 0}], "`weight: 0`"),
    ],
)
def test_conversations_that_cannot_be_trained_on(messages: Any, reason: str, red: str, write: Write) -> None:
    good = {"messages": [USER_RED, ANSWER], "images": [red]}
    with pytest.raises(RequestError, match=f"line 2: (.*){reason}"):
        prepared(write(good, {"messages": messages, "images": [red]}))


def test_rows_of_no_known_layout_name_those_there_are() -> None:
    with pytest.raises(RequestError, match=r"image and question and answer \(question_answer\)"):
        prepared("device-errors")


def test_a_question_is_never_left_out(red: str, write: Write) -> None:
    with pytest.raises(RequestError, match=r"set data\.columns\.answer=text"):
        prepared(write({"image": red, "question": "What?", "text": "red"}))
    assert only(write({"image": red, "text": "red"})).answers == ("red",)


def test_a_folder_of_pictures_that_is_called_like_a_split(tmp_path: Path, picture: Encode) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "red.png").write_bytes(picture(RED))
    (tmp_path / "rows.jsonl").write_text('{"image": "val/red.png", "question": "What?", "answer": "red"}\n')
    assert colour(only(tmp_path)) == RED


def test_of_a_large_parquet_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = {"image": ["no.png"] * 1000, "question": ["What?"] * 1000, "answer": [str(n) for n in range(1000)]}
    datasets.Dataset.from_dict(rows).to_parquet(str(file))
    with pytest.raises(RequestError, match="none of its 3 rows can be trained on"):
        prepared(file, max_rows=3, bad_rows="drop")


def test_one_list_at_the_top_tells_of_pictures_in_all_folders(tmp_path: Path, picture: Encode) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "red.png").write_bytes(picture(RED))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "test/red.png", "text": "red"}\n')
    (tmp_path / "metadata.json").write_text('{"about": "this folder"}')
    assert only(tmp_path).answers == ("red",)
    (tmp_path / "metadata.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="no rows"):
        prepared(tmp_path)
