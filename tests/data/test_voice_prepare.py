"""Rows of a voice, prepared: what is heard in their clips, what is dropped, what is held out, what is told."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.config.schema import DataSettings, VoiceSettings
from trimtab.data.voice_prepare import BUILT_IN, PreparedVoice, prepare_voice
from trimtab.data.voice_rows import VoiceRow
from trimtab.errors import RequestError

Encode = Callable[..., bytes]
Write = Callable[..., str]
Speak = Callable[..., str]


def prepared(
    source: str | Path, *, seed: int = 0, voice: dict[str, Any] | None = None, **settings: Any
) -> PreparedVoice:
    data = DataSettings(source=str(source), **{"eval_fraction": 0.0, "bad_rows": "stop"} | settings)
    return prepare_voice(data, VoiceSettings(**voice or {}), seed, print)


def refused(source: str | Path, **settings: Any) -> str:
    with pytest.raises(RequestError) as error:
        prepared(source, **settings)
    return str(error.value)


def spoken(rows: list[VoiceRow] | None) -> set[str]:
    return {row.target.key for row in rows or [] if row.target is not None}


def heard(rows: list[VoiceRow] | None) -> set[str]:
    return {row.reference.key for row in rows or [] if row.reference is not None}


@pytest.fixture
def put(tmp_path: Path, sound: Encode) -> Speak:
    """Write a clip and give its name."""

    def written(name: str, **how: Any) -> str:
        (tmp_path / name).write_bytes(sound(**how))
        return name

    return written


# What is heard


@pytest.mark.parametrize(
    ("changes", "why", "found"),
    [
        ({"seconds": 0.1}, "clip is shorter than voice.min_seconds=0.2", ", 0.10 s"),
        ({"seconds": 3.0}, "clip is longer than voice.max_seconds=2", ", 3.00 s"),
        ({"samples": np.zeros(9_000)}, "clip is silent: nothing but zeros", ""),
        ({"samples": np.full(9_000, 0.5)}, "clip is one constant value, no sound", ""),
        (
            {"samples": np.sin(np.arange(9_000)) * 5e-4},
            "clip is silent: its loudest tenth of a second is under voice.silence=-60 dB",
            ", -69 dB",
        ),
        (
            {"samples": np.sin(np.arange(9_000)) * 5e-4 + 0.5},
            "clip is silent: its loudest tenth of a second is under voice.silence=-60 dB",
            ", -69 dB",
        ),
        (
            {"samples": np.stack([np.sin(np.arange(9_000)) / 2, -np.sin(np.arange(9_000)) / 2], 1)},
            "clip is silent when mixed down: its channels cancel each other; keep one of them",
            "",
        ),
        (
            {"samples": np.clip(np.sin(np.arange(9_000) / 50) * 4, -1, 1)},
            "clip is clipped: more than voice.clipping=0.02 of it stands at full scale",
            "%",
        ),
        ({"rate": 6_000}, "clip has a sample rate under 8,000 Hz", ""),
    ],
)
def test_a_clip_that_cannot_be_learned_from_is_named(
    put: Speak, write: Write, changes: dict[str, Any], why: str, found: str
) -> None:
    good = {"audio": put("good.wav"), "text": "Hi."}
    put("bad.wav", subtype="PCM_24", **changes)
    for number, bad in enumerate(
        (
            {"audio": "bad.wav", "text": "Ho."},
            {"audio": "good.wav", "text": "Ho.", "reference": "bad.wav", "reference_text": "Oh."},
        )
    ):
        file = write(good, bad, good | {"text": "Third."}, name=f"{number}.jsonl")
        told = refused(file, voice={"max_seconds": 2.0})
        assert told.startswith(f"{file}, line 2 (bad.wav)")
        assert found in told.split(": ")[0]
        assert why in told.splitlines()[0]
        assert "data.bad_rows=drop" in told
        kept = prepared(file, bad_rows="drop", voice={"max_seconds": 2.0})
        assert [row.text for row in kept.train] == ["Hi.", "Third."]
        assert kept.report.train.dropped == {why: 1}


def test_faults_of_one_kind_are_counted_as_one(put: Speak, write: Write) -> None:
    rows = [
        {"audio": put(f"{n}.wav", seconds=3 + n, rate=8_000, pitch=100 + 10 * n), "text": "x"}
        for n in range(4)
    ]
    rows += [{"audio": f"none{n}.wav", "text": "x"} for n in range(3)]
    file = write({"audio": put("a.wav"), "text": "Hi."}, *rows)
    report = prepared(file, bad_rows="drop", voice={"max_seconds": 2.5}).report
    assert report.train.dropped == {
        "clip is longer than voice.max_seconds=2.5": 4,
        "clip is not there": 3,
    }
    assert f"    dropped 3: clip is not there (first: {file}, line 6 (none0.wav))" in report.lines()
    assert (report.train.rows_read, report.train.rows_kept) == (8, 1)


def test_what_is_not_listened_to_is_still_found_and_measured(
    put: Speak, write: Write, tmp_path: Path
) -> None:
    put("zeros.wav", samples=np.zeros(24_000))
    found = prepared(write({"audio": "zeros.wav", "text": "Hi."}), voice={"check_clips": False})
    assert "not listened to before (voice.check_clips=false)" in "\n".join(found.report.lines())
    assert found.report.minutes_train == pytest.approx(1 / 60)
    put("long.wav", seconds=31)
    for name, why in (("none.wav", "not there"), ("long.wav", "longer than voice.max_seconds=30")):
        assert why in refused(write({"audio": name, "text": "Hi."}), voice={"check_clips": False})


def test_no_row_at_all_tells_every_reason(put: Speak, write: Write) -> None:
    file = write({"audio": "none.wav", "text": "Hi."}, {"audio": put("a.wav"), "text": ""})
    told = refused(file, bad_rows="drop")
    assert "none of its 2 rows can be trained on" in told
    assert "1 clip is not there (first: " in told
    assert "1 no text" in told


# What repeats


def test_a_row_that_repeats_another_is_dropped_by_content(put: Speak, write: Write) -> None:
    put("a.wav"), put("copy.wav"), put("r.wav", pitch=300), put("s.wav", pitch=310)
    row = {"audio": "a.wav", "text": "Hi.", "reference": "r.wav", "reference_text": "So."}
    file = write(
        row,
        row | {"audio": "copy.wav", "speaker": "anna"},
        row | {"text": "Ho."},
        row | {"reference": "s.wav"},
        row | {"scene": "in a car"},
    )
    found = prepared(file)
    assert len(found.train) == 4
    assert found.report.train.dropped == {"repeats an earlier row": 1}
    assert found.report.train.first_dropped["repeats an earlier row"].endswith("line 2")
    assert len(prepared(file, keep_duplicates=True).train) == 5
    assert "1 clip with more than one text: only one can be what is said" in found.report.notes


# What is held out


@pytest.fixture
def readings(put: Speak, write: Write) -> str:
    """Two voices, ten clips each, all after one reference of the voice, which is no row's target; some of the clips
    twice, under another name and with a second text."""
    rows = []
    for number in range(20):
        voice = "ab"[number % 2]
        put(f"ref-{voice}.wav", pitch=700 if voice == "a" else 900)
        for name in (f"{number}.wav", f"{number}-copy.wav"):
            put(name, pitch=100 + 10 * number)
        row = {"reference": f"ref-{voice}.wav", "reference_text": "So.", "speaker": voice}
        rows.append(row | {"audio": f"{number}.wav", "text": f"Sentence {number}."})
        if number % 4 == 0:
            rows.append(row | {"audio": f"{number}-copy.wav", "text": f"Again {number}."})
    return write(*rows)


def test_a_clip_is_never_on_both_sides_and_a_reference_ties_nothing(readings: str) -> None:
    for seed in range(5):
        found = prepared(readings, eval_fraction=0.2, seed=seed)
        assert len(found.train) + len(found.eval or []) == 25
        assert 5 <= len(found.eval or []) <= 6
        assert not spoken(found.train) & spoken(found.eval)
        assert not heard(found.train) & spoken(found.eval)
    assert found.report.split == "data.eval_fraction=0.2, seed 4, by clip"


def test_the_split_is_by_seed_and_not_by_order(readings: str, tmp_path: Path) -> None:
    turned = tmp_path / "turned.jsonl"
    turned.write_text("\n".join(reversed(Path(readings).read_text().splitlines())))
    one, other = (prepared(source, eval_fraction=0.2, seed=3) for source in (readings, turned))
    assert (
        spoken(one.eval) == spoken(other.eval) != spoken(prepared(readings, eval_fraction=0.2, seed=4).eval)
    )


def test_a_clip_that_others_refer_to_stays_in_training(put: Speak, write: Write) -> None:
    """The first clip of the voice is a target and the reference of all the others."""
    put("0.wav"), put("1.wav", pitch=300)
    rows = [{"audio": "0.wav", "text": "First.", "reference": "1.wav", "reference_text": "x"}]
    for number in range(1, 8):
        name = put(f"{number}.wav", pitch=300 + 20 * (number - 1))
        rows.append({"audio": name, "text": f"{number}.", "reference": "0.wav", "reference_text": "First."})
    file = write(*rows)
    for seed in range(6):
        found = prepared(file, eval_fraction=0.5, seed=seed)
        assert (len(found.train), len(found.eval or [])) == (4, 4)
        assert not heard(found.train) & spoken(found.eval)
        assert found.report.train.dropped == {}


def test_where_every_clip_is_anothers_reference_the_rows_that_hear_it_are_left_out(
    put: Speak, write: Write
) -> None:
    names = [put(f"{number}.wav", pitch=200 + 20 * number) for number in range(10)]
    rows = [
        {"audio": name, "text": f"Of {name}.", "reference": names[number - 1], "reference_text": "x"}
        for number, name in enumerate(names)
    ]
    for seed in range(4):
        found = prepared(write(*rows), eval_fraction=0.2, seed=seed)
        assert len(found.eval or []) == 2
        assert not (heard(found.train) | spoken(found.train)) & spoken(found.eval)
        left = found.report.train.dropped["its reference is a clip that is held out"]
        assert left == 8 - len(found.train) > 0
        assert found.report.train.rows_kept == found.report.rows_train + found.report.rows_eval
    for two in (rows[:2], rows[:1]):
        two[0]["reference"] = "1.wav"
        assert "data.eval_fraction=0.5: " in refused(write(*two), eval_fraction=0.5)


def test_an_evaluation_source_that_shares_clips_is_told(readings: str, put: Speak, write: Write) -> None:
    put("new.wav", pitch=555)
    rows = [{"audio": name, "text": "New."} for name in ("new.wav", "3.wav", "ref-a.wav")]
    held = write(*rows, name="held.jsonl")
    found = prepared(readings, eval_source=held)
    assert (len(found.train), len(found.eval or [])) == (25, 3)
    assert found.report.split == f"data.eval_source={held}"
    assert found.report.notes[0].startswith("data.source has 2 of the clips that data.eval_source asks for")
    assert found.report.eval is not None
    assert any(line.startswith("evaluation data: ") for line in found.report.lines())


def test_a_folder_with_splits(tmp_path: Path, sound: Encode) -> None:
    for number, split in enumerate(("train", "val")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.wav").write_bytes(sound(pitch=200 + 50 * number))
        (tmp_path / split / "metadata.json").write_text(
            json.dumps([{"audio": "a.wav", "text": f"In {split}."}])
        )
    found = prepared(tmp_path, eval_source=f"{tmp_path}[val]")
    assert [row.text for row in found.train] == ["In train."]
    assert [row.text for row in found.eval or []] == ["In val."]
    assert found.report.train.notes == ["data.split=train left out val/"]


# What is told


def test_the_report(put: Speak, write: Write) -> None:
    put("a.wav", rate=16_000), put("b.flac", form="FLAC", rate=48_000), put("r.wav", pitch=500)
    stereo = np.random.default_rng(0).uniform(-0.2, 0.2, (24_000, 6))
    put("six.wav", samples=stereo)
    common = {"reference": "r.wav", "reference_text": "So.", "emotion": "calm"}
    file = write(
        {"audio": "a.wav", "text": "One.", "speaker": "anna"} | common,
        {"audio": "b.flac", "text": "Two.", "speaker": "ben"} | common,
        {"audio": "six.wav", "text": "Three.", "speaker": "anna"},
        {"audio": "r.wav", "text": "So."} | common,
    )
    found = prepared(file)
    assert found.eval is None
    assert found.report.lines() == [
        f"data: {file} (local file)",
        "  format: clips (audio from audio; text from text; reference from reference; "
        "reference_text from reference_text; speaker from speaker)",
        "  columns not used: emotion",
        "  rows: 4 read, 4 kept",
        "    1 × clip of 6 channels mixed down to one",
        "speakers: 2, rows of each: anna (2), ben (1)",
        "clips: 4 different, every one listened to; 1 × 16,000 Hz, 2 × 24,000 Hz, 1 × 48,000 Hz",
        "sound: 2 seconds to train on, 0 seconds held out",
        "split: 4 rows to train on, 0 held out (data.eval_fraction=0)",
        "note: 1 clip under 24,000 Hz: resampled, but what is above half of the old rate is not there",
        "note: 1 row with the target itself for a reference: it can be copied, and is not learned",
    ]
    told = json.loads(json.dumps(found.report.as_dict()))
    assert told["rates"] == {"16000": 1, "24000": 2, "48000": 1}
    assert told["minutes_train"] == pytest.approx(2.5 / 60)
    assert pickle.loads(pickle.dumps(found.train)) == found.train


def test_at_most_so_many_rows(readings: str) -> None:
    found = prepared(readings, max_rows=3)
    assert (len(found.train), found.report.train.rows_read) == (3, 3)


def test_the_clips_that_come_with_trimtab() -> None:
    pytest.importorskip("soundfile")
    if not BUILT_IN["espeak-voices"].is_dir():
        pytest.skip("the shipped clips are not in this checkout")
    found = prepared("espeak-voices", eval_fraction=0.1)
    assert found.report.train.source == "espeak-voices (built in)"
    assert len(found.report.speakers) >= 2
    assert found.report.train.dropped == {}
    assert found.eval
