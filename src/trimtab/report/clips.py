"""Clips of a run inside its page: each with a player and its spectrogram. Reads wav files of the run itself alone.

What is not there, or is too much for a page that a browser opens at once, is said.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterable, Mapping, Sequence
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


class Players:
    """The clips of one page, in the order in which they come: the first find room."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.room = folder, MOST
        self.left_out: list[str] = []

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> str:
        """All that a summary tells of its clips, which nobody need believe."""
        shown = "".join(self._sample(sample) for sample in samples)
        if self.left_out:
            shown += note(
                f"Without a player, to keep the page under {MOST / 2**20:.0f} MB of sound: {', '.join(self.left_out)}."
            )
        return shown

    def _sample(self, sample: Mapping[str, Any]) -> str:
        named = sample.get("clips")
        files = {str(name): str(file) for name, file in named.items()} if isinstance(named, Mapping) else {}
        read = {name: _read(self.folder, file) for name, file in files.items()}
        longest = max(
            (found[0].size / found[1] for found in read.values() if not isinstance(found, str)), default=1
        )
        told = [str(sample[key]) for key in ("speaker", "row") if sample.get(key)]
        figures = [
            self._figure(name, files.get(name), read.get(name), sample, longest)
            for name in dict.fromkeys([*files, "before", "after"])
        ]
        return (
            f'<article class="voice">{said(sample.get("prompt", ""))}{note(", ".join(told)) if told else ""}'
            f'<div class="clips">{"".join(figures)}</div></article>'
        )

    def _figure(
        self,
        name: str,
        file: str | None,
        found: tuple[Samples, int] | str | None,
        sample: Mapping[str, Any],
        longest: float,
    ) -> str:
        title, meaning = _NAMES.get(name, (name, ""))
        told = sample.get(name, "missing") if name in ("before", "after") else meaning
        head = f"<figcaption><strong>{text(title)}</strong> {text(told)}</figcaption>"
        if isinstance(found, str) or found is None or file is None:
            # What cannot be heard tells why by itself.
            heard = "" if str(told).startswith("could not be heard") else note(found or "no clip was kept")
            return f"<figure>{head}{heard}</figure>"
        samples, rate = found
        label = f"{title}: {sample.get('prompt', '')}"
        return f"<figure>{head}{_drawn(samples, rate, longest, label)}{self._player(file, samples, rate)}</figure>"

    def _player(self, file: str, samples: Samples, rate: int) -> str:
        short = samples[: int(LONGEST * rate)]
        coded = base64.b64encode(_wav(short, rate)).decode("ascii")
        if len(coded) > self.room:
            self.left_out.append(file)
            return ""
        self.room -= len(coded)
        cut = note(f"the first {LONGEST:g} s; all of it is in {file}") if len(short) < len(samples) else ""
        return f'<audio controls preload="metadata" src="data:audio/wav;base64,{coded}"></audio>{cut}'


def _read(folder: Path, name: str) -> tuple[Samples, int] | str:
    """The samples of a file of the run's own and their rate, or why there are none."""
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size > LARGEST:
        return f"{name} is too large for the page"
    try:
        with wave.open(io.BytesIO(file.read_bytes())) as opened:
            if (opened.getnchannels(), opened.getsampwidth()) != (1, 2) or not opened.getnframes():
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
    """The spectrogram with its axes; as wide as its share of the longest clip beside it."""
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
