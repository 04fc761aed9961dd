"""Sound as numbers: decoded from wav, flac, mp3 or ogg, resampled, measured, and written as wav.

What a file is called does not matter, only what it holds. A file that cannot be decoded whole is refused, and nothing
is ever put in its place. Knows no rows and no codec.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.data.clean import BadRow
from trimtab.data.resample import resample as resample
from trimtab.data.sound_ends import declared_bytes_missing
from trimtab.errors import RequestError
from trimtab.files import whole_file

Samples = npt.NDArray[np.float32]

RATE = 24_000
"""Samples a second that Higgs Audio's codec takes."""
LEAST_RATE, MOST_RATE = 8_000, 384_000
FORMATS = {"WAV": "wav", "WAVEX": "wav", "RF64": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg"}
"""What is decoded, by libsndfile's names."""
FULL_SCALE = 0.9999
# A peak touches full scale for a sample or two; a wave that was cut stays there.
SHORTEST_RUN = 3

MOST_SAMPLES = 1 << 28
"""Samples of all channels together that are decoded: three hours of one channel at 24 kHz, 1 GiB of memory."""
MOST_CHANNELS = 32

_BLOCK = 1 << 18
# An encoder's own count may be off by the frame that holds it.
_MP3_FRAMES = 2 * 1152


@dataclass(frozen=True)
class Sound:
    """One channel of sound, and how many the file had."""

    samples: Samples
    rate: int
    channels: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself before it is decoded."""

    form: str
    rate: int
    channels: int
    frames: int


def read_sound(source: Path | bytes, where: str) -> Sound:
    """The sound of a file or of its bytes, mixed down to one channel; `where` names it in an error."""
    try:
        frames, rate = decode(source)
    except BadRow as bad:
        raise RequestError.of(
            f"{where}: {bad}",
            "a row or a voice is nothing without its clip, and no other may stand in for it",
            "repair or replace the clip; data.bad_rows=drop with voice.check_clips=true leaves such rows out before "
            "training",
        ) from bad
    return Sound(mixed(frames), rate, frames.shape[1])


def header(source: Path | bytes) -> Header:
    """What the file says of itself; BadRow where it is not there or not sound."""
    with _opened(source) as opened:
        return _header(opened)


def decode(source: Path | bytes, most_seconds: float | None = None) -> tuple[Samples, int]:
    """All frames of the file, (frames, channels), and its sample rate; BadRow with the reason where it is not whole.

    A file that declares more than `most_seconds` is refused before it is decoded.
    """
    with _opened(source) as opened:
        told = _header(opened)
        check_long(told.frames, told.rate, most_seconds)
        _check_most(told.frames, told)
        blocks: list[Samples] = []
        count = 0
        while len(block := opened.read(_BLOCK // told.channels, dtype="float32", always_2d=True)):
            blocks.append(block)
            count += len(block)
            # A header may say less than follows.
            check_long(count, told.rate, most_seconds)
            _check_most(count, told)
    found = sum(map(len, blocks))
    if not found:
        raise BadRow("clip has no frames")
    slack = _MP3_FRAMES if told.form == "mp3" else 0
    if found < told.frames - slack or declared_bytes_missing(source, told.form):
        raise BadRow("clip is cut off: it has less sound than its header says")
    frames = np.concatenate(blocks)
    if not np.isfinite(frames).all():
        raise BadRow("clip has samples that are no numbers (NaN or infinite)")
    return frames, told.rate


def _check_most(frames: int, told: Header) -> None:
    if frames * told.channels > MOST_SAMPLES:
        hours = MOST_SAMPLES / told.channels / told.rate / 3600
        raise BadRow(
            f"clip is longer than the {hours:.1f} h that are decoded of such a one; cut it into clips"
        )


def check_long(frames: int, rate: int, most_seconds: float | None) -> None:
    if most_seconds is not None and frames > most_seconds * rate:
        raise BadRow(f"clip is longer than voice.max_seconds={most_seconds:g}")


def mixed(frames: Samples) -> Samples:
    """(frames, channels) mixed down to one channel."""
    return frames[:, 0].copy() if frames.shape[1] == 1 else frames.mean(axis=1, dtype=np.float32)


def peak(samples: Samples) -> float:
    """The largest distance from zero; 1 is full scale."""
    return float(np.abs(samples).max()) if samples.size else 0.0


def loudness(samples: Samples, rate: int = RATE) -> float:
    """Decibels of full scale (RMS) of the loudest tenth of a second; -inf is silence. An offset is not heard, and does
    not count."""
    window = min(max(rate // 10, 1), len(samples))
    if not window:
        return -math.inf
    views = np.lib.stride_tricks.sliding_window_view(samples, window)[:: max(window // 2, 1)]
    # The last tenth counts too where the steps do not meet the end.
    power = max(
        float(views.var(axis=1, dtype=np.float64).max()), float(samples[-window:].var(dtype=np.float64))
    )
    return 10 * math.log10(power) if power > 0 else -math.inf


def clipped(frames: Samples) -> float:
    """The share of samples that stand at full scale in runs, of the channel that has most; (frames, channels)."""
    return max(
        (_runs(channel >= FULL_SCALE) + _runs(channel <= -FULL_SCALE)) / len(channel) for channel in frames.T
    )


def _runs(at: npt.NDArray[np.bool_]) -> int:
    """How many of the marked places stand in runs of `SHORTEST_RUN` or more."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], at.astype(np.int8), [0]))))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= SHORTEST_RUN].sum())


def write_wav(path: Path, samples: Samples, rate: int) -> None:
    """Write one channel as 16-bit PCM, whole or not at all. What is beyond full scale is written as full scale."""
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise ValueError(f"samples of shape {samples.shape}: one channel of finite numbers is written")
    scaled = np.rint(np.clip(samples.astype(np.float64), -1.0, 1.0) * 32767).astype("<i2")
    with whole_file(path) as scratch, wave.open(str(scratch), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(scaled.tobytes())


@contextmanager
def _opened(source: Path | bytes) -> Iterator[Any]:
    """The source as an open SoundFile; what it raises about the content is a bad row."""
    soundfile = _soundfile()
    found = False
    try:
        if isinstance(source, bytes):
            if not source:
                raise BadRow("clip is empty (0 bytes)")
            with soundfile.SoundFile(io.BytesIO(source)) as opened:
                found = True
                yield opened
            return
        with _file(source) as file:
            if not file.seek(0, io.SEEK_END):
                raise BadRow("clip is empty (0 bytes)")
            file.seek(0)
            # By its number, not by its name: the name may lie, and `.raw` would be believed.
            with soundfile.SoundFile(file.fileno(), closefd=False) as opened:
                found = True
                yield opened
    except soundfile.LibsndfileError as error:
        why = error.error_string.removeprefix("Error : ").strip().rstrip(".")
        what = "is damaged or cut off" if found else "cannot be decoded"
        raise BadRow(f"clip {what} ({why})") from error


def _file(path: Path) -> io.FileIO:
    try:
        if path.is_file():
            return io.FileIO(path)
        there = path.exists()
    except OSError as error:
        raise BadRow(f"clip cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise BadRow("clip has a path that no file can have") from None
    raise BadRow("clip is not a file" if there else "clip is not there")


def _header(opened: Any) -> Header:
    form = FORMATS.get(opened.format)
    if form is None:
        raise BadRow(f"clip is {opened.format}, none of {', '.join(dict.fromkeys(FORMATS.values()))}")
    rate, channels, frames = opened.samplerate, opened.channels, opened.frames
    if not LEAST_RATE <= rate <= MOST_RATE:
        beyond = f"under {LEAST_RATE:,}" if rate < LEAST_RATE else f"over {MOST_RATE:,}"
        raise BadRow(f"clip has a sample rate {beyond} Hz")
    if not 1 <= channels <= MOST_CHANNELS:
        raise BadRow(f"clip has more than {MOST_CHANNELS} channels, or none")
    # A stream that was written without knowing its length; libsndfile gives a number that no file has.
    if not 0 <= frames < 2**62:
        raise BadRow(f"clip does not say how long it is, as a {form} from a pipe; write it as a file again")
    return Header(form, rate, channels, frames)


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise RequestError.of(
            f"clips cannot be read: soundfile does not load ({error})",
            "wav, flac, mp3 and ogg are decoded by libsndfile, which the package soundfile brings",
            "pip install 'trimtab[voice]'",
        ) from None
    return soundfile
