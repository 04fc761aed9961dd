"""Speech for what listens to it, made by espeak-ng where that is installed."""

from __future__ import annotations

import shutil
import subprocess
import wave
from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture(scope="session")
def espeak(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[np.ndarray, int]]:
    """`espeak(text, voice)`: one channel and its sample rate."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed (a package of Debian's; .ci/run installs it)")
    folder = tmp_path_factory.mktemp("espeak")

    def say(text: str, voice: str = "en-us") -> tuple[np.ndarray, int]:
        path = folder / "said.wav"
        subprocess.run(["espeak-ng", "-v", voice, "-s", "140", "-w", str(path), text], check=True)
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
            return samples.astype(np.float32) / 32768, file.getframerate()

    return say
