"""Rows of a voice: which columns and files they come from, and what cannot be one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.config.schema import DataSettings
from trimtab.data.clean import BadRow, Tally
from trimtab.data.read import read_file
from trimtab.data.voice_rows import COLUMNS, VoiceRow, made, used_columns
from trimtab.data.voice_source import BUILT_IN, load_voice_rows
from trimtab.errors import RequestError

Write = Callable[..., str]


def rows_of(source: str | Path, tally: Tally | None = None, **settings: Any) -> list[VoiceRow]:
    """The rows of a source; the files of their clips need not be there."""
    data = DataSettings(source=str(source), **settings)
    loaded = load_voice_rows(str(source), data, "data.source")
    columns = used_columns(loaded.rows, data.columns)
    return [made(row, columns, tally or Tally()) for row in loaded.rows]


def refused(source: str | Path, **settings: Any) -> str:
    with pytest.raises(BadRow) as bad:
        rows_of(source, **settings)
    return str(bad.value)


SAMPLE = {
    "id": "anna_000001",
    "audio_file": "anna_000001.wav",
    "transcript_file": "anna_000001.txt",
    "duration": 3.2,
    "speaker_id": "anna",
    "speaker_name": "Anna",
    "scene": "quiet_room",
    "emotion": "questioning",
    "ref_audio_file": "ref.wav",
    "ref_transcript": "This is how I sound.",
    "task_type": "audio_generation",
}
"""As the trainers for Higgs Audio that people share lay their data out."""


def test_the_layout_of_the_community(tmp_path: Path) -> None:
    (tmp_path / "anna_000001.txt").write_text("Who is there?\n")
    whole = {"dataset_info": {"total_samples": 1, "speakers": ["anna"]}, "samples": [SAMPLE]}
    (tmp_path / "metadata.json").write_text(json.dumps(whole))
    tally = Tally()
    (row,) = rows_of(tmp_path, tally)
    assert (row.text, row.reference_text, row.speaker) == ("Who is there?", "This is how I sound.", "anna")
    assert row.target is not None
    assert row.target.path == tmp_path / "anna_000001.wav"
    assert row.reference is not None
    assert row.reference.path == tmp_path / "ref.wav"
    assert row.reference.where == f"{tmp_path / 'metadata.json'}, row 1 (ref.wav)"
    assert row.scene == "Audio is recorded from quiet room."
    assert list(tally.changed) == ["name of a scene written as `Audio is recorded from …`"]


def test_the_same_rows_in_every_wrapping(tmp_path: Path) -> None:
    rows = [{"id": name, "audio": f"{name}.wav", "text": f"Word {name}."} for name in "ab"]
    by_id = {row["id"]: {key: row[key] for key in ("audio", "text")} for row in rows}
    wrapped = {
        "list.json": json.dumps(rows),
        "samples.json": json.dumps({"samples": rows, "speakers": ["x"], "languages": ["en"]}),
        "keyed.json": json.dumps({"dataset_info": {"n": 2}, **by_id}),
        "lines.jsonl": "\n".join(json.dumps(row) for row in rows),
        "table.csv": "id,audio,text\n" + "".join(f"{r['id']},{r['audio']},{r['text']}\n" for r in rows),
    }
    for name, content in wrapped.items():
        (tmp_path / name).write_text(content)
        found = rows_of(tmp_path / name)
        assert [(row.text, row.target and row.target.path) for row in found] == [
            ("Word a.", tmp_path / "a.wav"),
            ("Word b.", tmp_path / "b.wav"),
        ], name


def test_clips_that_are_named_by_the_id_and_texts_beside(tmp_path: Path) -> None:
    for name in ("a.wav", "b.flac", "ref.mp3"):
        (tmp_path / name).write_bytes(b"")
    for name, text in (("a", "One."), ("b", "Two."), ("ref", "How I sound.")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8-sig")
    (tmp_path / "metadata.json").write_text(json.dumps({"a": {"reference": "ref.mp3"}, "b": {}}))
    a, b = rows_of(tmp_path)
    assert (a.text, b.text, a.reference_text, b.reference) == ("One.", "Two.", "How I sound.", None)
    assert a.target is not None
    assert a.target.path.name == "a.wav"
    assert b.target is not None
    assert b.target.path.name == "b.flac"


def test_a_folder_of_pairs_needs_no_list(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("b.wav", "a.mp3", "part/c.ogg"):
        (tmp_path / name).write_bytes(b"")
        (tmp_path / name).with_suffix(".txt").write_text(f"Text of {name}.")
    assert [row.text for row in rows_of(tmp_path)] == [
        f"Text of {n}." for n in ("a.mp3", "b.wav", "part/c.ogg")
    ]
    (tmp_path / "b.txt").unlink()
    assert refused(tmp_path).startswith("no text: neither a column")


def test_columns_are_renamed_by_the_settings(write: Write) -> None:
    file = write({"sound": "a.wav", "words": {"en": "Hello."}, "who": 7, "text": "not this"})
    (row,) = rows_of(file, columns={"audio": "sound", "text": "words.en", "speaker": "who"})
    assert (row.text, row.speaker, row.target and row.target.path.name) == ("Hello.", "7", "a.wav")
    with pytest.raises(RequestError, match=r"no column `texts`(?s:.*)did you mean data\.columns\.text=words"):
        rows_of(file, columns={"texts": "words"})
    with pytest.raises(RequestError, match="no row has a column `said`"):
        rows_of(file, columns={"text": "said"})
    with pytest.raises(RequestError, match=r"no row names a clip(?s:.*)set data\.columns\.audio=sound"):
        rows_of(file)


def test_one_reference_in_a_list_of_voices_is_taken_and_several_are_refused(write: Write) -> None:
    voice = {"speaker_tag": "[SPEAKER0]", "ref_audio_file": "r.wav", "ref_transcript": "So."}
    plain = {"audio": "a.wav", "text": "Hi.", "reference": "own.wav", "reference_text": "Own."}
    one, own = rows_of(write({"audio": "a.wav", "text": "Hi.", "ref_speakers": [voice]}, plain))
    assert (one.reference_text, own.reference_text) == ("So.", "Own.")
    assert one.reference is not None
    assert one.reference.path.name == "r.wav"
    assert "several voices" in refused(
        write({"audio": "a.wav", "text": "Hi.", "ref_speakers": [voice, voice]})
    )


def test_scenes(write: Write) -> None:
    scenes = ["Audio is recorded from a street.", "in a car", "phone_call", "unknown", "", None]
    found = rows_of(write(*({"audio": "a.wav", "text": "Hi.", "scene": scene} for scene in scenes)))
    assert [row.scene for row in found] == [
        "Audio is recorded from a street.",
        "in a car",
        "Audio is recorded from phone call.",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"text": ""}, "no text"),
        ({"text": "  "}, "`text` is empty"),
        ({"text": None}, "no text"),
        ({"text": ["a"]}, "`text` is a list"),
        ({"text": "a <|AUDIO_OUT|> b"}, r"`text` holds <\|AUDIO_OUT\|>"),
        ({"text": "end<|eot_id|>"}, r"`text` holds <\|eot_id\|>"),
        ({"text": "bell \x07"}, r"`text` holds the control character U\+0007"),
        ({"text": "half \ud83d"}, r"`text` holds the half of a character U\+D83D"),
        ({"text": None, "text_file": "none.txt"}, "text file cannot be read"),
        ({"text": None, "text_file": "latin.txt"}, "text file is not UTF-8"),
        ({"text": None, "text_file": "empty.txt"}, "text file is empty"),
        ({"text": None, "text_file": "tokens.txt"}, "text file holds"),
        ({"audio": None}, "no clip"),
        ({"audio": None, "id": "nothing"}, "no file that is named by `id`"),
        ({"audio": " "}, "`audio` is empty"),
        ({"audio": "/"}, "`audio` is no file"),
        ({"audio": 5}, "`audio` is of type int"),
        ({"audio": {"bytes": "x"}}, "`audio` is an object"),
        ({"audio": "https://example.org/a.wav"}, "https address"),
        ({"reference": "r.wav"}, "reference clip without its text"),
        ({"reference_text": "So."}, "and no reference clip"),
        ({"reference": "r.wav", "reference_text": "<|AUDIO|>"}, "`reference_text` holds"),
        ({"scene": "<|scene_desc_end|>"}, "`scene` holds"),
        ({"speaker": ["a"]}, "`speaker` is a list"),
        ({"ref_speakers": "anna"}, "`ref_speakers` is a str"),
    ],
)
def test_what_cannot_be_a_row(tmp_path: Path, write: Write, changes: dict[str, Any], why: str) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "tokens.txt").write_text("<|audio_eos|>")
    assert re.search(why, refused(write({"audio": "a.wav", "text": "Hi."} | changes)))


def test_newlines_and_other_scripts_are_no_control_characters(write: Write) -> None:
    texts = ["One.\nTwo.\tThree.", "你好，世界", "Xin chào", "a < b | c > d", "👋🏽 \u200dwaves"]
    assert [
        row.text for row in rows_of(write(*({"audio": "a.wav", "text": text} for text in texts)))
    ] == texts


def test_a_path_may_not_lead_out(tmp_path: Path, write: Write) -> None:
    rows = [{"audio": path, "text": "Hi."} for path in ("b/../c.wav", str(tmp_path / "d.wav"))]
    found = rows_of(write(*rows))
    assert [row.target and row.target.path for row in found] == [tmp_path / "b/../c.wav", tmp_path / "d.wav"]
    for outside in ("../a.wav", "/etc/hostname", "~/a.wav"):
        with pytest.raises(RequestError, match=r"clip '.*' leads out of the data's folder"):
            rows_of(write({"audio": outside, "text": "Hi."}))
    with pytest.raises(RequestError, match="leads out of the data's folder"):
        rows_of(write({"audio": "a.wav", "text_file": "../secret.txt"}))


def test_sources_that_hold_nothing_to_read(tmp_path: Path, write: Write) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    mute = tmp_path / "mute"
    mute.mkdir()
    (mute / "a.wav").write_bytes(b"")
    two = tmp_path / "two"
    two.mkdir()
    for name in ("metadata.json", "metadata.jsonl"):
        (two / name).write_text("[]")
    for source, why in (
        (empty, "no clips and no list of them .*folder is empty"),
        (mute, r"1 clips and no text \(a.wav\)"),
        (two, "several lists of clips"),
        (write(name="none.jsonl"), "no rows"),
        ("espeak-voice", "did you mean espeak-voices"),
        (tmp_path / "emty", f"did you mean {empty}"),
        ("s3://bucket/key", "nothing is downloaded"),
        ("owner/name", "nothing is downloaded"),
    ):
        with pytest.raises(RequestError, match=rf"(?s){why}"):
            rows_of(source)


def test_shipped_clips_that_are_missing_are_not_the_users_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "espeak-voices", tmp_path / "voices")
    with pytest.raises(RequestError, match="not in this installation"):
        rows_of("espeak-voices")


def test_a_list_called_samples_is_the_one_with_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"speakers": ["a"], "samples": [{"text": "Hi."}]}))
    assert [row.values for row in read_file(file)] == [{"text": "Hi."}]
    file.write_text(json.dumps({"speakers": ["a"], "others": [{"text": "Hi."}]}))
    with pytest.raises(RequestError, match="several lists inside"):
        read_file(file)


def test_the_example_and_the_names_of_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "voice.md").read_text(encoding="utf-8")
    section = page.partition("## Your own clips")[2].partition("\n## ")[0]
    (example,) = re.findall(r"```json\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "metadata.json").write_text(example)
    anna, ben = rows_of(tmp_path)
    assert (anna.speaker, anna.reference_text, ben.reference) == ("anna", "This is how I sound.", None)
    table = section.partition("| column |")[2].partition("\n\n")[0]
    for column, others in re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", others)) <= set(COLUMNS[column])
