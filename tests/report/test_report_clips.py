"""Samples with clips: heard and seen where they are the run's own; what is missing or too much is said."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trimtab.data.sound import write_wav
from trimtab.report import clips
from trimtab.report.make import make_report
from trimtab.report.spectrogram import HEIGHT, heights, spectrogram

Parse = Callable[[str], Any]
RATE = 24_000
NAMES = ("reference", "true", "codec", "before", "after")


def tone(hertz: float, seconds: float) -> Any:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(RATE * seconds)) / RATE)).astype(np.float32)


def told(run: Path, files: Any, **more: Any) -> str:
    summary = json.loads((run / "summary.json").read_text())
    sample = {
        "prompt": "say <b>it</b>",
        "before": "1 s <i>",
        "after": "2 s",
        "speaker": "ada",
        "row": "held out",
    }
    summary["samples"] = [{**sample, "clips": files, **more}]
    (run / "summary.json").write_text(json.dumps(summary))
    return make_report(run).page


def kept(run: Path, *names: str, seconds: float = 0.5) -> dict[str, str]:
    files = {name: f"clips/0-{name}.wav" for name in names}
    for place, file in enumerate(files.values()):
        write_wav(run / file, tone(300 * (place + 1), seconds), RATE)
    return files


def sound_of(player: dict[str, str | None]) -> tuple[int, Any]:
    src = player["src"] or ""
    with wave.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))) as file:
        frames = file.readframes(file.getnframes())
        return file.getframerate(), np.frombuffer(frames, dtype="<i2") / 32768


def test_every_clip_of_a_sample_is_heard_and_seen(grpo_run: Path, parse: Parse) -> None:
    files = kept(grpo_run, *NAMES)
    html = told(grpo_run, files)
    page = parse(html)
    assert len(page.all("audio")) == len(page.all("img")) == len(NAMES)
    # Who does not see the page hears which clip a player has.
    assert [one["aria-label"] for one in page.all("audio")] == [one["alt"] for one in page.all("img")]
    assert all("say <b>it</b>" in (image["alt"] or "") for image in page.all("img"))
    for part in (
        "Clips before and after",
        "Reference",
        "True clip, coded",
        "1 s <i>",
        "ada, held out",
        "2 kHz",
    ):
        assert part in page.text
    assert "missing" not in page.text


def test_a_player_plays_what_was_kept(grpo_run: Path) -> None:
    html = told(grpo_run, kept(grpo_run, "before", "after"))
    players = [part.split('"')[0] for part in html.split('src="')[1:] if part.startswith("data:audio")]
    rate, samples = sound_of({"src": players[1]})
    assert rate == RATE
    assert samples == pytest.approx(tone(600, 0.5), abs=1e-3)


def test_what_is_no_clip_of_the_run_is_not_played(grpo_run: Path, parse: Parse) -> None:
    write_wav(grpo_run.parent / "secret.wav", tone(200, 0.1), RATE)
    (grpo_run / "clips").mkdir()
    (grpo_run / "clips" / "link.wav").symlink_to(grpo_run.parent / "secret.wav")
    (grpo_run / "clips" / "text.wav").write_text("<script>")
    (grpo_run / "clips" / "cut.wav").write_bytes(b"RIFF\x00\x00\x00\x00WAVE")
    write_wav(grpo_run / "clips" / "none.wav", tone(200, 0), RATE)
    bad = {"a": "../secret.wav", "b": "clips/link.wav", "c": "clips/text.wav", "d": "clips/cut.wav"}
    page = parse(told(grpo_run, bad | {"e": "clips/none.wav"}))
    assert not page.all("audio")
    assert page.text.count("is missing") == 2
    assert page.text.count("is no wav file") == 2
    assert "clips/none.wav is no clip" in page.text
    assert not parse(told(grpo_run, ["clips/0-true.wav"])).all("audio")


def test_a_clip_that_could_not_be_heard_says_why_and_no_more(grpo_run: Path, parse: Parse) -> None:
    files = kept(grpo_run, "true") | {"before": "clips/0-before.wav", "after": "clips/0-after.wav"}
    page = parse(told(grpo_run, files, before="could not be heard: it ended before its first sound"))
    assert "it ended before its first sound" in page.text
    assert "0-before.wav" not in page.text
    assert "clips/0-after.wav is missing" in page.text


def test_a_page_stays_small(grpo_run: Path, parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "LONGEST", 0.25)
    html = told(grpo_run, kept(grpo_run, "before", "after"))
    assert "the first 0.25 s; all of it is in clips/0-after.wav" in parse(html).text
    monkeypatch.setattr(clips, "MOST", 20_000)  # one of the two, which take 16 kB each
    page = parse(told(grpo_run, kept(grpo_run, "before", "after")))
    assert len(page.all("audio")) == 1
    assert len(page.all("img")) == 2
    assert "Without a player" in page.text
    assert "clips/0-before.wav" in page.text, "what it says after training is heard first"


def test_a_clip_that_does_not_end_leaves_room_for_the_others(grpo_run: Path) -> None:
    files = kept(grpo_run, "true", "after", seconds=1) | {"before": "clips/0-before.wav"}
    write_wav(grpo_run / files["before"], tone(300, 9), RATE)
    html = told(grpo_run, files)
    assert html.count("width:50.00%") == 2
    assert html.count("width:100.00%") == 1


@pytest.mark.parametrize("hertz", [500, 2000, 8000])
def test_a_tone_is_drawn_at_its_pitch_for_its_time(hertz: int) -> None:
    samples = np.concatenate([tone(hertz, 0.5), np.zeros(RATE // 2, dtype=np.float32)])
    image = np.array(Image.open(io.BytesIO(spectrogram(samples, RATE))).convert("L")).astype(float)
    assert image.shape == (HEIGHT, 100)
    brightest = HEIGHT - 1 - image[:, 10:40].mean(axis=1).argmax()
    assert brightest / HEIGHT == pytest.approx(heights(RATE)[hertz], abs=1.5 / HEIGHT)
    assert image[:, 60:].max() < image[:, 10:40].max() / 4


def test_short_and_long_clips_are_drawn() -> None:
    for seconds in (1 / RATE, 0.01, 40):
        image = Image.open(io.BytesIO(spectrogram(tone(440, seconds), RATE)))
        assert image.format == "PNG"
        assert 1 <= image.width <= 1000
