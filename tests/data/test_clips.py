"""A clip of a row: one channel at the rate that is asked for, a key of its content, and errors that name the row."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab.data.clips import Clip
from trimtab.data.sound import loudness
from trimtab.errors import RequestError

Encode = Callable[..., bytes]


def test_a_clip_is_heard_at_the_rate_that_is_asked_for(tmp_path: Path, sound: Encode) -> None:
    (tmp_path / "a.flac").write_bytes(sound(rate=16_000, seconds=0.75, form="FLAC"))
    clip = Clip(tmp_path / "a.flac", "row 1")
    found = clip.sound(24_000)
    assert (found.shape, found.dtype) == ((18_000,), np.float32)
    assert np.abs(np.fft.rfft(found)).argmax() == pytest.approx(220 * 0.75, abs=1)
    assert clip.sound(16_000).shape == (12_000,)


def test_clips_of_the_same_bytes_have_one_key(tmp_path: Path, sound: Encode) -> None:
    for name, data in (("a.wav", sound()), ("b.wav", sound()), ("c.wav", sound(pitch=300))):
        (tmp_path / name).write_bytes(data)
    a, b, c = (Clip(tmp_path / f"{name}.wav", "row 1") for name in "abc")
    assert a.key == b.key == hashlib.sha256(sound()).hexdigest() != c.key
    again = pickle.loads(pickle.dumps(a))
    assert again == a
    assert np.array_equal(again.sound(8_000), a.sound(8_000))


def test_a_clip_that_went_away_or_broke_names_its_row(tmp_path: Path, sound: Encode) -> None:
    gone = Clip(tmp_path / "gone.wav", "x.json, row 3 (gone.wav)")
    for ask in (lambda: gone.sound(24_000), lambda: gone.key):
        with pytest.raises(
            RequestError, match=r"^x\.json, row 3 \(gone\.wav\): clip .*\n  why: .*\n  change: "
        ):
            ask()
    (tmp_path / "cut.wav").write_bytes(sound()[:5_000])
    with pytest.raises(RequestError, match="row 4: clip is cut off"):
        Clip(tmp_path / "cut.wav", "row 4").sound(24_000)


def test_real_recordings(shared_data: Path) -> None:
    pytest.importorskip("soundfile")
    for name, seconds in (("2.wav", 2.901), ("3.flac", 5.855)):
        found = Clip(shared_data / "speech" / name, name).sound(24_000)
        assert len(found) / 24_000 == pytest.approx(seconds, abs=1e-3)
        assert -40 < loudness(found) < 0
