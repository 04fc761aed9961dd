"""Judging a voice: what is compared with what, the instruments on real speech, and one that is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trimtab.bench.voices import judge_voice, voice_lines
from trimtab.data.clips import Clip
from trimtab.data.sound import write_wav
from trimtab.recipes.takes import Take, Takes

TEXTS = ("good morning to all of you", "she opened the old green window")
VOICES = {"ada": "en-us+f2", "tom": "en-us+m3"}
Say = Callable[..., tuple[np.ndarray, int]]


def no_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pocketsphinx", "resemblyzer"):
        monkeypatch.setitem(sys.modules, name, None)


def take(**changed: Any) -> Take:
    given: dict[str, Any] = {
        **{"text": "good morning", "where": "rows.jsonl row 1", "trained": True, "speaker": None},
        **{"spoken": np.zeros(24_000, dtype=np.float32), "coded": None, "rate": 24_000, "ended": True},
        **{"true": None, "reference": None},
    }
    return Take(**given | changed)


def test_without_instruments_the_other_figures_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    no_instruments(monkeypatch)
    rows = [take(), take(ended=False, spoken=np.zeros(48_000, dtype=np.float32)), take(trained=False)]
    found = judge_voice(Takes(rows, {}), lambda line: None)
    assert found["trained"] == {"rows": 2, "ended": 1, "seconds": 1.5}
    assert found["held_out"] == {"rows": 1, "ended": 1, "seconds": 1.0}
    assert len(found["missing"]) == 2
    assert all("pip install 'trimtab[judge]'" in text for text in found["missing"])
    told = voice_lines(found)
    assert told[0].split() == ["spoken", "rows", "2", "trained", "on", "1", "held", "out"]
    assert any(line.split() == ["ended", "by", "itself", "1", "of", "2", "1", "of", "1"] for line in told)
    assert sum("not judged" in line for line in told) == 2


def test_no_row_of_a_part_is_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    no_instruments(monkeypatch)
    found = judge_voice(Takes([take()], {}), lambda line: None)
    assert found["held_out"] == {"rows": 0}
    assert "held out" not in voice_lines(found)[0]


@pytest.fixture(scope="module")
def clips(espeak: Say, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Clip]]:
    """Three clips of each voice: both texts and another one."""
    for package in ("pocketsphinx", "webrtcvad", "resemblyzer"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra `judge`)")
    folder = tmp_path_factory.mktemp("clips")
    made: dict[str, list[Clip]] = {}
    for name, voice in VOICES.items():
        for number, text in enumerate((*TEXTS, "there are many people in the city today")):
            path = folder / f"{name}-{number}.wav"
            write_wav(path, *espeak(text, voice))
            made.setdefault(name, []).append(Clip(path, path.name))
    return made


def test_a_clip_in_its_own_voice_and_one_in_anothers(clips: dict[str, list[Clip]]) -> None:
    """The model of this test says its text well, once as it should and once in the other's voice; then it is silent."""
    rate = 24_000
    right = take(text=TEXTS[1], speaker="ada", true=clips["ada"][1], reference=clips["ada"][0])
    spoken = clips["ada"][1].sound(rate)
    rows = [
        take(**vars(right) | {"spoken": spoken, "coded": spoken * np.float32(0.5)}),
        take(**vars(right) | {"spoken": clips["tom"][1].sound(rate), "trained": False}),
        take(**vars(right) | {"trained": False}),
    ]
    found = judge_voice(Takes(rows, clips), lambda line: None)
    own, other, silent = (row["likeness"] for row in found["rows"])
    assert found["missing"] == []
    assert found["speakers"] == ["ada", "tom"]
    assert (own["nearer_to_own"], other["nearer_to_own"], silent["nearer_to_own"]) == (True, False, False)
    assert own["own_speaker"] > own["others"]["tom"]
    assert other["own_speaker"] < other["others"]["tom"]
    # Its own true clip is not counted as the speaker's voice: the likeness to that would be 1.
    assert own["own_speaker"] < 0.99
    assert silent == {"reference": None, "own_speaker": None, "others": {"tom": None}, "nearer_to_own": False}
    assert found["trained"]["nearer_to_own"] == {"rows": 1, "of": 1}
    assert found["held_out"]["nearer_to_own"] == {"rows": 0, "of": 2}

    said, _, nothing = (row["word_errors"] for row in found["rows"])
    # The same sound has the same errors, whatever its loudness and rate.
    assert said["spoken"]["rate"] == pytest.approx(said["true"]["rate"], abs=0.2)
    assert nothing["spoken"] == {"edits": 6, "words": 6, "rate": 1.0}
    assert set(nothing) == {"spoken", "true"}
    rates = found["held_out"]["word_error_rate"]
    both = found["rows"][1]["word_errors"]["spoken"]["edits"] + 6
    assert rates["spoken"] == both / 12
    assert rates["coded"] is None
    assert any("nearer to its speaker" in line and "0 of 2" in line for line in voice_lines(found))


def test_data_without_names_of_speakers_is_compared_with_the_reference_alone(
    clips: dict[str, list[Clip]],
) -> None:
    row = take(spoken=clips["ada"][1].sound(24_000), reference=clips["ada"][0])
    found = judge_voice(Takes([row], {}), lambda line: None)
    alike = found["rows"][0]["likeness"]
    assert alike["reference"] > 0.6
    assert (alike["own_speaker"], alike["others"], alike["nearer_to_own"]) == (None, {}, None)
    assert found["trained"]["nearer_to_own"] is None
    assert any("names no speaker" in text for text in found["missing"])


def test_a_speaker_with_one_clip_is_known_by_the_reference(clips: dict[str, list[Clip]]) -> None:
    row = take(
        spoken=clips["ada"][1].sound(24_000), speaker="ada", reference=clips["ada"][0], true=clips["ada"][1]
    )
    voices = {"ada": clips["ada"][:2], "tom": clips["tom"]}
    alike = judge_voice(Takes([row], voices), lambda line: None)["rows"][0]["likeness"]
    assert alike["own_speaker"] is None
    assert alike["nearer_to_own"] is True
