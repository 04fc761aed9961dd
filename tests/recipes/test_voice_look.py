"""A run of a voice is heard before and after: its clips, its codec, its page, and the verb that lets it speak."""

from __future__ import annotations

import json
import shutil
import subprocess
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder
from trimtab.recipes.voice_look import of_each_speaker
from trimtab.report.make import make_report
from voices import voice, write_clip

pytest.importorskip("soundfile")

Verb = Callable[..., subprocess.CompletedProcess[str]]
TEXT = "They are building a bridge."


def words(data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("recipe=voice", "device=cpu", f"data={data}", f"output_dir={out}", "monitor.progress=none"),
        *("training.max_steps=2", "training.batch_size=2", "training.save_steps=1", "voice.show=3"),
        *("data.eval_fraction=0.2", "voice.max_seconds=2", "voice.temperature=0", *more),
    ]


def run(settings: list[str]) -> tuple[Path, dict[str, Any]]:
    config = load_config(None, settings)
    folder = open_run_folder(config)
    summary = run_recipe(config, plan_run(config).plan, folder, lambda line: None)
    return folder.path, summary


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two voices that say five things each, after a clip of their own."""
    folder, rows = tmp_path_factory.mktemp("clips"), []
    for speaker, pitch in (("low", 110.0), ("high", 220.0)):
        write_clip(folder / f"{speaker}.wav", voice(9, 0.5, pitch))
        for number in range(5):
            write_clip(folder / f"{speaker}-{number}.wav", voice(number, 0.4, pitch))
            row = {"audio": f"{speaker}-{number}.wav", "text": f"Thing {number}.", "speaker": speaker}
            rows.append(row | {"reference": f"{speaker}.wav", "reference_text": "The first thing."})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def spoken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return run(words(data, tmp_path_factory.mktemp("voice") / "run"))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.wav"))}


def test_a_run_keeps_its_clips_and_tells_them(spoken: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = spoken
    samples = summary["samples"]
    assert [sample["row"] for sample in samples] == ["trained on", "trained on", "held out"]
    assert samples[0]["speaker"] != samples[1]["speaker"]
    for sample in samples:
        assert list(sample["clips"]) == ["reference", "true", "codec", "before", "after"]
        for name, file in sample["clips"].items():
            with wave.open(str(folder / file)) as clip:
                assert (clip.getnchannels(), clip.getsampwidth(), clip.getframerate()) == (1, 2, 24_000)
                seconds = clip.getnframes() / 24_000
            if name in ("before", "after"):
                assert float(sample[name].split()[0]) == pytest.approx(seconds, abs=0.006)
    # The codec's frames are 40 ms long: the round trip is as long as the clip, to the frame.
    lengths = [(folder / samples[0]["clips"][name]).stat().st_size / 48_000 for name in ("true", "codec")]
    assert lengths[1] == pytest.approx(lengths[0], abs=0.041)


def test_the_codec_of_a_run_is_kept_with_it(spoken: tuple[Path, dict[str, Any]]) -> None:
    from trimtab.data.voice_prepare import prepare_voice
    from trimtab.models.codec import codec_for, identity, load_run_codec

    folder, _ = spoken
    config = load_config(folder / "config.yaml", [])
    plan = plan_run(config).plan
    rows = prepare_voice(config.data, config.voice, config.seed, lambda line: None)
    learned = codec_for(config, plan, rows.train, lambda line: None)
    assert identity(load_run_codec(config, plan, folder)) == identity(learned)


def test_the_page_of_a_run_plays_its_clips(spoken: tuple[Path, dict[str, Any]]) -> None:
    page = make_report(spoken[0]).page
    assert page.count("data:audio/wav;base64,") == page.count("data:image/png;base64,") == 15


def test_a_run_that_goes_on_keeps_what_was_heard_first(
    spoken: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(spoken[0], folder)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-2")
    first = bytes_of(folder / "clips")
    (folder / "clips" / "0-after.wav").unlink()
    _, summary = run(words(data, folder, "training.resume=true"))
    assert bytes_of(folder / "clips") == first
    assert summary["samples"] == json.loads((spoken[0] / "summary.json").read_text())["samples"]


def test_nothing_is_spoken_where_nothing_is_to_be_shown(data: Path, tmp_path: Path) -> None:
    folder, summary = run(words(data, tmp_path / "run", "voice.show=0"))
    assert summary["samples"] == []
    assert not (folder / "clips").exists()
    assert (folder / "codec" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.virtual_gpus(1)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_run_in_half_precision_is_heard_as_well(data: Path, tmp_path: Path, precision: str) -> None:
    settings = [word for word in words(data, tmp_path / "run") if word != "device=cpu"]
    folder, summary = run([*settings, f"precision={precision}"])
    assert (summary["device"], summary["precision"]) == ("cuda:0", precision)
    for sample in summary["samples"]:
        assert all((folder / file).is_file() for file in sample["clips"].values())
        assert not sample["after"].startswith("could not")


def test_the_first_of_each_speaker_comes_before_the_second_of_any() -> None:
    rows: list[Any] = [SimpleNamespace(row=SimpleNamespace(speaker=name)) for name in "aaabbc"]
    assert [row.row.speaker for row in of_each_speaker(rows, 4)] == ["a", "b", "c", "a"]
    assert of_each_speaker(rows, 0) == []
    assert len(of_each_speaker(rows, 99)) == 6


def test_the_verb_says_what_the_run_said(
    spoken: tuple[Path, dict[str, Any]], trimtab: Verb, tmp_path: Path
) -> None:
    folder, summary = spoken
    sample = summary["samples"][0]
    out = tmp_path / "out.wav"
    options = ["--text", sample["prompt"], "--speaker", sample["speaker"], "--out", str(out)]
    done = trimtab("speak", str(folder), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: {sample['after']}")
    assert f"as {sample['speaker']} sounds in " in done.stderr
    assert out.read_bytes() == (folder / sample["clips"]["after"]).read_bytes()
    again = trimtab("speak", str(folder), *options)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    drawn = trimtab(
        "speak", str(folder), *options, "--overwrite", "--temperature", "1", "--seed", "3", "--json"
    )
    told = json.loads(drawn.stdout)
    assert told["file"] == str(out)
    assert told["seconds"] == pytest.approx((out.stat().st_size - 44) / 48_000, abs=1e-3)
    assert out.read_bytes() != (folder / sample["clips"]["after"]).read_bytes()


def test_a_clip_of_ones_own_is_taken_with_its_words(
    spoken: tuple[Path, dict[str, Any]], trimtab: Verb, tmp_path: Path
) -> None:
    folder, summary = spoken
    clip = tmp_path / "me.wav"
    shutil.copy(folder / summary["samples"][0]["clips"]["reference"], clip)
    asked = ["speak", str(folder), "--text", TEXT, "--reference", str(clip)]
    unknown = trimtab(*asked, "--out", str(tmp_path / "a.wav"))
    assert unknown.returncode == 2
    assert "--reference-text" in unknown.stderr
    given = trimtab(*asked, "--reference-text", "It rains.", "--out", str(tmp_path / "a.wav"))
    clip.with_suffix(".txt").write_text("It rains.\n", encoding="utf-8")
    beside = trimtab(*asked, "--out", str(tmp_path / "b.wav"))
    assert given.returncode == beside.returncode == 0, given.stderr + beside.stderr
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    write_clip(clip, voice(0) * 0)
    silent = trimtab(*asked, "--out", str(tmp_path / "d.wav"))
    assert silent.returncode == 2
    assert "no voice to sound like" in silent.stderr
    # Without a clip and a speaker it has a voice of its own choice.
    free = trimtab("speak", str(folder), "--text", TEXT, "--out", str(tmp_path / "c.wav"))
    assert free.returncode == 0, free.stderr


def test_what_cannot_be_heard_is_a_failure_and_no_file(
    spoken: tuple[Path, dict[str, Any]], trimtab: Verb, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(spoken[0], folder)
    config = (folder / "config.yaml").read_text()
    assert "silence: -60.0" in config
    # So that all that is softer than full scale counts as silent.
    (folder / "config.yaml").write_text(config.replace("silence: -60.0", "silence: -0.001"))
    done = trimtab("speak", str(folder), "--text", TEXT, "--out", str(tmp_path / "a.wav"))
    assert done.returncode == 1
    assert "could not be heard: it is silent" in done.stderr
    assert not (tmp_path / "a.wav").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--out", "a.mp3"], "a wav file is written"),
        (["--out", "none/a.wav"], "there is no folder none"),
        (["--speaker", "nobody"], "its speakers are"),
        (["--reference", "none.wav"], "no such file"),
        (["--reference-text", "words"], "without --reference"),
        (["--text", "  "], "--text is empty"),
        (["--text", "<|AUDIO_OUT|>"], "a token of its own"),
    ],
)
def test_what_cannot_be_spoken_is_refused(
    spoken: tuple[Path, dict[str, Any]], trimtab: Verb, tmp_path: Path, more: list[str], said: str
) -> None:
    done = trimtab("speak", str(spoken[0]), "--text", TEXT, *more, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_question_is_not_for_a_voice(spoken: tuple[Path, dict[str, Any]], trimtab: Verb) -> None:
    done = trimtab("ask", str(spoken[0]), "how are you?")
    assert done.returncode == 2
    assert "trimtab speak" in done.stderr
