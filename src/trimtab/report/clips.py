"""Clips of a run inside its page: each with a player and its spectrogram. Reads wav files of the run itself alone.

What is not there, or is too much for a page that a browser opens at once, is said.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.report.frame import note, said, text
from trimtab.report.spectrogram import Samples, heights, spectrogram

LONGEST = 12.0
"""Seconds of a clip that the page holds."""
MOST = 6 * 2**20
"""Bytes of all players of a page together."""
LARGEST = 2**26
"""Bytes of a file that is read."""
LEAST_RATE = 4000

_NAMES = {
    "reference": ("Reference", "the voice that it is to sound like"),
    "true": ("True clip", "as it was recorded"),
    "codec": (
        "True clip, coded",
        "after the codec's round trip: as well as a model with this codec can sound",
    ),
    "before": ("Before training", ""),
    "after": ("After training", ""),
}


_FIRST = ("after", "before", "codec", "true", "reference")
"""Which of them are heard where there is no room for all."""
Found = tuple[Samples, int]


@dataclass(frozen=True)
class _Sample:
    """What a summary tells of one sample, which nobody need believe, and what was found of its clips."""

    told: Mapping[str, Any]
    files: dict[str, str]
    clips: dict[str, Found | str]
    """The samples and their rate, or why there are none."""

    @classmethod
    def of(cls, folder: Path, told: Mapping[str, Any]) -> _Sample:
        named = told.get("clips")
        files = {str(name): str(file) for name, file in named.items()} if isinstance(named, Mapping) else {}
        return cls(told, files, {name: _read(folder, file) for name, file in files.items()})

    @property
    def seconds(self) -> float:
        """How much time the drawings have room for: twice the row's own clips, where the model does not end."""
        long = {
            name: len(clip[0]) / clip[1] for name, clip in self.clips.items() if not isinstance(clip, str)
        }
        own = [seconds for name, seconds in long.items() if name not in ("before", "after")]
        return min(max(long.values(), default=1), 2 * max(own, default=LONGEST))


def shown(folder: Path, told: Sequence[Mapping[str, Any]]) -> str:
    """The samples of a page, with their clips as far as there is room."""
    samples = [_Sample.of(folder, sample) for sample in told]
    heard, left_out = _with_players(samples)
    parts = [_article(sample, heard) for sample in samples]
    if left_out:
        room = f"{MOST / 2**20:.0f} MB of sound"
        parts.append(note(f"Without a player, to keep the page under {room}: {', '.join(left_out)}."))
    return "".join(parts)


def _with_players(samples: Sequence[_Sample]) -> tuple[set[str], list[str]]:
    """The files that find room, those of the model first; and those that do not."""
    names = dict.fromkeys([*_FIRST, *(name for sample in samples for name in sample.files)])
    room, heard, left_out = MOST, set[str](), list[str]()
    for name, sample in product(names, samples):
        clip = sample.clips.get(name, "")
        if isinstance(clip, str):
            continue
        need = 4 * (2 * len(_short(*clip)) + 44) // 3
        if need <= room:
            room -= need
            heard.add(sample.files[name])
        else:
            left_out.append(sample.files[name])
    return heard, left_out


def _article(sample: _Sample, heard: Container[str]) -> str:
    whose = [str(sample.told[key]) for key in ("speaker", "row") if sample.told.get(key)]
    figures = (_figure(sample, name, heard) for name in dict.fromkeys([*sample.files, "before", "after"]))
    return (
        f'<article class="voice">{said(sample.told.get("prompt", ""))}{note(", ".join(whose)) if whose else ""}'
        f'<div class="clips">{"".join(figures)}</div></article>'
    )


def _figure(sample: _Sample, name: str, heard: Container[str]) -> str:
    title, meaning = _NAMES.get(name, (name, ""))
    told = sample.told.get(name, "missing") if name in ("before", "after") else meaning
    head = f"<figcaption><strong>{text(title)}</strong> {text(told)}</figcaption>"
    clip = sample.clips.get(name, "no clip was kept")
    if isinstance(clip, str):
        # What cannot be heard tells why by itself.
        return f"<figure>{head}{'' if str(told).startswith('could not be heard') else note(clip)}</figure>"
    called = f"{title}: {sample.told.get('prompt', '')}"
    drawn = _drawn(*clip, sample.seconds, called)
    player = _player(*clip, sample.files[name], called) if sample.files[name] in heard else ""
    return f"<figure>{head}{drawn}{player}</figure>"


def _player(samples: Samples, rate: int, file: str, called: str) -> str:
    short = _short(samples, rate)
    coded = base64.b64encode(_wav(short, rate)).decode("ascii")
    cut = note(f"the first {LONGEST:g} s; all of it is in {file}") if len(short) < len(samples) else ""
    named = f'aria-label="{text(called)}"'
    return f'<audio controls {named} preload="metadata" src="data:audio/wav;base64,{coded}"></audio>{cut}'


def _short(samples: Samples, rate: int) -> Samples:
    return samples[: int(LONGEST * rate)]


def _read(folder: Path, name: str) -> Found | str:
    """The samples of a file of the run's own and their rate, or why there are none."""
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size > LARGEST:
        return f"{name} is too large for the page"
    try:
        with wave.open(io.BytesIO(file.read_bytes())) as opened:
            form = opened.getnchannels(), opened.getsampwidth()
            if form != (1, 2) or not opened.getnframes() or opened.getframerate() < LEAST_RATE:
                return f"{name} is no clip with one channel of 16 bits"
            rate, frames = opened.getframerate(), opened.readframes(opened.getnframes())
    except (wave.Error, EOFError):
        return f"{name} is no wav file"
    samples = np.frombuffer(frames[: len(frames) // 2 * 2], dtype="<i2").astype(np.float32)
    return samples / np.float32(32768), rate


def _wav(samples: Samples, rate: int) -> bytes:
    """Written anew, so that nothing but sound comes into the page."""
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(rate)
        opened.writeframes((samples * 32768).astype("<i2").tobytes())
    return file.getvalue()


def _drawn(samples: Samples, rate: int, longest: float, label: str) -> str:
    """The spectrogram with its axes; as wide as its share of the time that all beside it have room for."""
    samples = samples[: max(1, int(longest * rate))]
    seconds = len(samples) / rate
    coded = base64.b64encode(spectrogram(samples, rate)).decode("ascii")
    width = f"{100 * seconds / longest:.2f}%"
    pitches = (
        f'<span style="bottom:{100 * at:.1f}%">{_kilo(hertz)}</span>' for hertz, at in heights(rate).items()
    )
    times = (f'<span style="left:{100 * at / longest:.2f}%">{at:g} s</span>' for at in _times(longest))
    return (
        f'<div class="pitch">{"".join(pitches)}</div>'
        f'<div class="drawn"><img style="width:{width}" src="data:image/png;base64,{coded}" alt="{text(label)}">'
        f'</div><div class="time">{"".join(times)}</div>'
    )


def _kilo(hertz: int) -> str:
    return f"{hertz / 1000:g} kHz" if hertz >= 1000 else f"{hertz} Hz"


def _times(longest: float) -> Iterable[float]:
    """About five round times, from 0 on."""
    step = next((step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60) if longest / step <= 6), 300)
    # The last stands inside the picture, so that its text does too.
    return [round(step * n, 1) for n in range(int(longest * 0.93 / step) + 1)]
