"""How a spoken clip is told, and the file that it becomes."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.models.spoken import Spoken

RATE, SILENCE = 24_000, -60.0


def clip(loud: float, seconds: float = 0.5, **more: Any) -> Spoken:
    times = np.arange(int(RATE * seconds)) / RATE
    samples = (loud * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
    return Spoken(samples, RATE, torch.zeros(0, 8), **{"ended": True, **more})


def read(path: Path) -> np.ndarray[Any, Any]:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 32767


def test_a_clip_is_told_in_one_line() -> None:
    # A sine's root mean square lies 3.01 dB below its peak.
    assert clip(0.5).told(SILENCE) == "0.50 s, ended by itself, peak 0.50, -9.0 dBFS"
    assert clip(0.5, ended=False).told(SILENCE).startswith("0.50 s, cut off: it did not end, peak 0.50")


def test_what_cannot_be_heard_is_told_with_its_reason() -> None:
    assert clip(0.5).unheard(SILENCE) is None
    assert "silent" in (clip(1e-5).unheard(SILENCE) or "")
    assert "(0.50 s, ended by itself)" in clip(0).told(SILENCE)
    empty = clip(0.5, seconds=0)
    assert empty.told(SILENCE) == "could not be heard: it ended before its first sound"
    assert clip(0.5, seconds=0, fault="not finite").told(SILENCE) == "could not be heard: not finite"


def test_a_written_clip_has_its_own_level(tmp_path: Path) -> None:
    spoken = clip(0.5)
    assert spoken.write(tmp_path / "out.wav") is None
    assert read(tmp_path / "out.wav") == pytest.approx(spoken.samples, abs=1 / 32767)


def test_a_clip_over_full_scale_is_made_quieter_not_cut(tmp_path: Path) -> None:
    spoken = clip(2.0)
    note = spoken.write(tmp_path / "out.wav")
    assert note == "made quieter by 6.1 dB: its peak was 2.00 of full scale"
    written = read(tmp_path / "out.wav")
    assert np.abs(written).max() == pytest.approx(0.99, abs=1e-3)
    assert written == pytest.approx(spoken.samples * 0.99 / 2, abs=1e-3)
