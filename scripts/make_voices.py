"""Makes the clips of `data.source: espeak-voices`: a few sentences, each said by several voices of espeak-ng.

    python scripts/make_voices.py [FOLDER]

Needs espeak-ng (Debian's 1.51 made those that are shipped) and soundfile. The sentences were written for this project.
Voices and sentences were chosen so that PocketSphinx understands most of what is said and Resemblyzer tells the
speakers apart: what an instrument cannot read to begin with, it cannot measure. The clips say nothing about these two.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "src" / "trimtab" / "data" / "shipped" / "voices"
VOICES = {
    "ada": ("en-us+f5", 60, 125),
    "edward": ("en-us+edward", 45, 125),
    "walter": ("en-us+grandpa", 45, 125),
}
"""By the speaker's name: espeak-ng's voice, its pitch (0 to 99) and its words a minute."""
SENTENCES = {
    "books": "There are three books on the table.",
    "bridge": "They are building a bridge over the river.",
    "rain": "It is going to rain in the evening.",
    "city": "My father works in the city.",
    "lawyer": "He wanted to become a lawyer.",
    "market": "We are going to the market.",
}
"""Said by every voice, each after the next one of them as its reference."""
HELD_OUT = {"years": "They have been working for many years."}
"""No row has them for a reference: those are the clips that Trimtab holds out first."""


def said(text: str, voice: str, pitch: int, speed: int) -> bytes:
    """A WAV file of 22,050 samples a second, mono, 16 bits."""
    command = ["espeak-ng", "-v", voice, "-p", str(pitch), "-s", str(speed), "--stdout", text]
    return subprocess.run(command, capture_output=True, check=True).stdout


def make(folder: Path) -> None:
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    names = list(SENTENCES)
    after = dict(zip(names, [*names[1:], names[0]], strict=True)) | {name: names[0] for name in HELD_OUT}
    texts, rows = SENTENCES | HELD_OUT, []
    for speaker, how in VOICES.items():
        for name, text in texts.items():
            samples, rate = soundfile.read(io.BytesIO(said(text, *how)), dtype="int16")
            soundfile.write(folder / f"{speaker}-{name}.flac", samples, rate, "PCM_16")
            rows.append(
                {
                    "audio": f"{speaker}-{name}.flac",
                    "text": text,
                    "reference": f"{speaker}-{after[name]}.flac",
                    "reference_text": texts[after[name]],
                    "speaker": speaker,
                }
            )
    (folder / "metadata.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
