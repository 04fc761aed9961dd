"""Sounds made by rule, a little like a voice: a buzz of moving pitch through moving formants, with pauses and hiss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

RATE = 24000
Samples = npt.NDArray[np.float32]


def voice(seed: int, seconds: float = 1.0, pitch: float = 120.0) -> Samples:
    """The same voice (pitch and formants' range) says another thing for each seed; its peak is 0.5."""
    draw = np.random.default_rng(seed)
    count = int(seconds * RATE)
    places = np.arange(count) / RATE
    corners = np.linspace(0, seconds, max(3, int(seconds * 6)))

    def moving(low: float, high: float) -> npt.NDArray[np.float64]:
        return np.interp(places, corners, draw.uniform(low, high, len(corners)))

    phase = 2 * np.pi * np.cumsum(pitch * moving(0.85, 1.2)) / RATE
    formants = [moving(300, 800), moving(900, 2200), moving(2300, 3200)]
    sound = np.zeros(count)
    for harmonic in range(1, int(4000 / pitch)):
        frequency = harmonic * pitch
        strength = sum(np.exp(-(((frequency - formant) / 150) ** 2)) for formant in formants) + 0.01
        sound += strength * np.sin(harmonic * phase)
    spoken = np.interp(places, corners, draw.random(len(corners)) > 0.25)
    sound = sound * spoken + 0.02 * draw.standard_normal(count) * (1 - spoken)
    return (0.5 * sound / np.abs(sound).max()).astype(np.float32)


def write_clip(path: Path, samples: Samples) -> Path:
    """The samples as 16-bit wav."""
    import wave

    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path
