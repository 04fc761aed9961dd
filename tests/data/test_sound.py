"""Sound as numbers: what is decoded, what is refused, another sample rate, and what is measured and written."""

from __future__ import annotations

import struct
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab.data.clean import BadRow
from trimtab.data.sound import clipped, decode, header, loudness, peak, read_sound, resample, write_wav
from trimtab.errors import RequestError

Encode = Callable[..., bytes]


def sine(pitch: float, rate: int, seconds: float = 1.0, height: float = 1.0) -> np.ndarray:
    return (height * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


# Decoding


@pytest.mark.parametrize(
    ("form", "subtype"), [("WAV", None), ("WAV", "FLOAT"), ("WAVEX", "PCM_24"), ("FLAC", None)]
)
def test_what_is_stored_without_loss_comes_back(sound: Encode, form: str, subtype: str | None) -> None:
    samples = sine(300, 22_050, height=0.5)
    found = read_sound(sound(samples=samples, rate=22_050, form=form, subtype=subtype), "here")
    assert (found.rate, found.channels, found.samples.dtype) == (22_050, 1, np.float32)
    assert np.abs(found.samples - samples).max() <= 1 / 32768


@pytest.mark.parametrize(("form", "subtype"), [("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_what_is_stored_with_loss_still_sounds_the_same(
    sound: Encode, form: str, subtype: str | None
) -> None:
    samples = sine(300, 24_000, height=0.5)
    found = read_sound(sound(samples=samples, form=form, subtype=subtype), "here").samples
    assert len(found) == len(samples)
    # Its height at the pitch, wherever an encoder's delay has put it.
    bin_of_pitch = np.abs(np.fft.rfft(found[4000:20_000] * np.hanning(16_000)))
    assert bin_of_pitch.argmax() == 200
    assert loudness(found) == pytest.approx(loudness(samples), abs=0.5)


@pytest.mark.parametrize("name", ["clip.mp3", "clip.raw", "clip.txt", "clip"])
def test_a_name_that_lies_does_not_matter(tmp_path: Path, sound: Encode, name: str) -> None:
    (tmp_path / name).write_bytes(sound(form="FLAC"))
    assert header(tmp_path / name).form == "flac"
    found = read_sound(tmp_path / name, "here").samples
    assert np.abs(found - read_sound(sound(), "here").samples).max() <= 1 / 32768


def test_channels_are_mixed_down(sound: Encode) -> None:
    left, right = sine(300, 24_000, height=0.5), sine(500, 24_000, height=0.25)
    found = read_sound(sound(samples=np.stack([left, right, right * 0], 1), subtype="FLOAT"), "here")
    assert found.channels == 3
    assert np.abs(found.samples - (left + right) / 3).max() < 1e-6


def test_a_wav_that_was_piped_declares_a_length_that_no_file_has(sound: Encode) -> None:
    whole = sound()
    for riff, data in ((0x7FFFF024, 0x7FFFF000), (0xFFFFFFFF, 0xFFFFFFFF)):
        piped = whole[:4] + struct.pack("<I", riff) + whole[8:40] + struct.pack("<I", data) + whole[44:]
        assert len(read_sound(piped, "here").samples) == 12_000


def test_a_flac_that_does_not_tell_its_length_is_refused(sound: Encode) -> None:
    """libsndfile cannot go through it."""
    piped = bytearray(sound(form="FLAC", seconds=2))
    piped[21] &= 0xF0
    piped[22:26] = bytes(4)
    with pytest.raises(BadRow, match="does not say how long it is, as a flac from a pipe"):
        decode(bytes(piped))


@pytest.mark.parametrize(
    ("form", "subtype", "why"),
    [
        ("WAV", "PCM_16", "cut off: it has less sound"),
        ("WAV", "FLOAT", "cut off: it has less sound"),
        ("FLAC", None, "damaged or cut off"),
        ("MP3", None, "cut off: it has less sound"),
        ("OGG", "VORBIS", "cut off: it has less sound"),
        ("OGG", "OPUS", "cut off: it has less sound"),
    ],
)
def test_a_file_that_ends_early_is_refused(
    tmp_path: Path, sound: Encode, form: str, subtype: str | None, why: str
) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(24_000 * 8).astype(np.float32)
    whole = sound(samples=noise, form=form, subtype=subtype)
    assert len(decode(whole)[0]) == len(noise)
    (tmp_path / "clip").write_bytes(whole[: len(whole) * 2 // 3])
    for source in (whole[: len(whole) * 2 // 3], tmp_path / "clip"):
        with pytest.raises(BadRow, match=why):
            decode(source)


def changed(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def test_what_is_no_sound_is_refused_with_the_reason(tmp_path: Path, sound: Encode) -> None:
    whole = sound()
    not_finite = sine(300, 24_000)
    not_finite[5] = np.nan
    infinite = sine(300, 24_000)
    infinite[5] = -np.inf
    for data, why in (
        (b"", "empty"),
        (b"<html>not found</html>", "cannot be decoded"),
        (whole[:30], "cannot be decoded"),
        (sound(samples=np.zeros(0)), "no frames"),
        (changed(whole, 22, bytes(2)), "cannot be decoded .*[Cc]hannel"),
        (changed(whole, 24, bytes(4)), "cannot be decoded"),
        (sound(rate=6_000), "under 8,000 Hz"),
        (changed(whole, 24, struct.pack("<I", 600_000)), "over 384,000 Hz"),
        (sound(form="AIFF"), "AIFF, none of wav, flac, mp3, ogg"),
        (sound(samples=not_finite, subtype="FLOAT"), "no numbers"),
        (sound(samples=infinite, subtype="FLOAT"), "no numbers"),
    ):
        with pytest.raises(BadRow, match=why):
            decode(data)
    for path, why in (
        (tmp_path / "none.wav", "not there"),
        (tmp_path, "not a file"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (tmp_path / "a\0b", "not there|no file can have"),
    ):
        with pytest.raises(BadRow, match=why):
            decode(path)
        with pytest.raises(RequestError, match=f"(?s)row 7: clip .*({why}).*change: "):
            read_sound(path, "row 7")


def test_a_long_file_is_refused_by_what_it_declares(tmp_path: Path, sound: Encode) -> None:
    """The samples are not there at all: it is the header alone that is believed."""
    hours = changed(sound(), 40, struct.pack("<I", 2 * 24_000 * 7200))
    file = tmp_path / "long.wav"
    with file.open("wb") as opened:
        opened.write(hours)
        opened.truncate(44 + 2 * 24_000 * 7200)  # a hole, which takes no room on the disk
    with pytest.raises(BadRow, match=r"longer than voice.max_seconds=30$"):
        decode(file, most_seconds=30)


def test_without_soundfile_the_way_out_is_told() -> None:
    code = (
        "import sys; sys.modules['soundfile'] = None\n"
        "from trimtab.data.sound import read_sound\n"
        "read_sound(b'RIFF', 'row 1')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'trimtab[voice]'" in done.stderr


# Another sample rate


@pytest.mark.parametrize("to", [16_000, 24_000, 48_000])
@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000])
def test_a_sine_stays_that_sine(rate: int, to: int) -> None:
    """Against the sine itself at the new times: its height and phase, in the pass band up to 90 % of the lower half."""
    for share in (0.01, 0.3, 0.9):
        pitch = share * min(rate, to) / 2
        found = resample(sine(pitch, rate), rate, to)
        inner = slice(to // 10, -to // 10)
        assert np.abs(found - sine(pitch, to))[inner].max() < 2e-4


@pytest.mark.parametrize(
    ("rate", "to"), [(44_100, 24_000), (48_000, 24_000), (24_000, 16_000), (96_000, 8_000)]
)
def test_what_the_lower_rate_cannot_hold_is_gone(rate: int, to: int) -> None:
    for pitch in (1.01 * to / 2, to - 50, min(1.4 * to, 0.99 * rate / 2)):
        found = resample(sine(pitch, rate), rate, to)
        inner = slice(to // 10, -to // 10)
        assert np.abs(found[inner]).max() < 2e-4


def test_nothing_is_heard_above_the_old_half_after_going_up() -> None:
    found = resample(sine(6_000, 16_000), 16_000, 48_000)[4_800:-4_800]
    heights = np.abs(np.fft.rfft(found * np.hanning(len(found)))) / (len(found) / 4)
    pitches = np.fft.rfftfreq(len(found), 1 / 48_000)
    assert heights[np.abs(pitches - 6_000) < 50].max() == pytest.approx(1, abs=1e-3)
    assert heights[pitches > 8_000].max() < 2e-4


def test_the_length_is_exact_and_a_constant_stays() -> None:
    for number in (1, 2, 7, 100, 1_001):
        for rate, to in ((16_000, 24_000), (44_100, 24_000), (24_000, 44_100), (7, 5), (44_101, 24_000)):
            assert len(resample(np.ones(number, np.float32), rate, to)) == -(-number * to // rate)
    found = resample(np.full(8_000, 0.25, np.float32), 16_000, 24_000)
    assert np.abs(found[2_000:-2_000] - 0.25).max() < 1e-6
    same = sine(300, 16_000)
    assert np.array_equal(resample(same, 16_000, 16_000), same)
    assert resample(same[:0], 16_000, 24_000).shape == (0,)


def test_it_is_the_sum_over_the_windowed_sinc() -> None:
    """The phases, taken together for speed, against the sum that defines it, at every place of a short sound."""
    samples = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    for rate, to in ((44_100, 24_000), (16_000, 24_000), (10, 7)):
        cutoff = 0.96 * min(1.0, to / rate)
        half = int(np.ceil(64 / cutoff))
        told = []
        for place in range(-(-len(samples) * to // rate)):
            middle = place * rate // to
            around = np.arange(middle + 1 - half, middle + half + 1)
            away = around - place * rate / to
            window = np.i0(7.86 * np.sqrt(np.clip(1 - (away / half) ** 2, 0, 1)))
            weights = np.sinc(cutoff * away) * window
            weights /= weights.sum()
            there = (around >= 0) & (around < len(samples))
            told.append((samples[around[there]] * weights[there]).sum())
        assert np.abs(resample(samples, rate, to) - np.array(told)).max() < 1e-5


# Measures


def test_loudness_is_that_of_the_loudest_tenth() -> None:
    loud = np.zeros(48_000, np.float32)
    loud[30_000:33_600] = sine(1_000, 24_000, 0.15, height=0.1)
    assert loudness(loud) == pytest.approx(20 * np.log10(0.1 / np.sqrt(2)), abs=0.1)
    assert loudness(loud + np.float32(0.4)) == pytest.approx(
        loudness(loud), abs=0.01
    )  # an offset is not heard
    at_end = np.zeros(25_000, np.float32)
    at_end[-2_400:] = sine(1_000, 24_000, 0.1)
    assert loudness(at_end) == pytest.approx(-3.01, abs=0.05)
    assert loudness(np.zeros(500, np.float32)) == loudness(np.zeros(0, np.float32)) == -np.inf
    assert (peak(loud), peak(-loud), peak(loud[:0])) == (pytest.approx(0.1, abs=1e-3), peak(loud), 0.0)


def test_only_runs_at_full_scale_are_clipping() -> None:
    touching = np.round(sine(100, 24_000) * 32767) / 32768  # as loud as it can be, and whole
    assert clipped(touching[:, None].astype(np.float32)) == 0
    high = np.clip(3 * sine(100, 24_000), -1, 1)
    share = 1 - 2 * np.arcsin(1 / 3) / np.pi
    assert clipped(high[:, None]) == pytest.approx(share, abs=0.02)
    # Of two channels the worse one counts.
    assert clipped(np.stack([high * 0, high], 1)) == clipped(high[:, None])


# Writing


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    samples = sine(300, 24_000) * 1.5
    write_wav(tmp_path / "new" / "out.wav", samples, 24_000)
    with wave.open(str(tmp_path / "new" / "out.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        found = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
    # Beyond full scale is full scale, and does not come round from the other side.
    assert np.abs(found - np.clip(samples, -1, 1)).max() <= 0.5 / 32767 + 1e-6
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["out.wav"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    write_wav(tmp_path / "out.wav", sine(300, 24_000), 24_000)
    before = (tmp_path / "out.wav").read_bytes()
    for wrong in (np.full(10, np.nan, np.float32), np.zeros((10, 2), np.float32)):
        with pytest.raises(ValueError, match="one channel of finite numbers"):
            write_wav(tmp_path / "out.wav", wrong, 24_000)
    assert (tmp_path / "out.wav").read_bytes() == before
