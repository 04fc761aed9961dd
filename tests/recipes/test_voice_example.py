"""examples/voice.yaml: a model that starts from noise learns to say six sentences in three voices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.config.schema import Config
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

pytest.importorskip("soundfile", reason="clips are read by soundfile (trimtab[voice])")

EXAMPLE = Path(__file__).parents[2] / "examples" / "voice.yaml"
HELD_OUT = "They have been working for many years."


def train(tmp_path: Path, *more: str) -> tuple[Config, dict[str, Any], list[dict[str, Any]]]:
    """The config, the summary and the metrics of the training steps."""
    config = load_config(EXAMPLE, [f"output_dir={tmp_path / 'run'}", "monitor.progress=none", *more])
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    assert summary["status"] == "finished"
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    return config, summary, [line for line in lines if line["phase"] == "train"]


def test_it_trains_on_six_sentences_and_holds_out_the_seventh() -> None:
    from trimtab.data.voice_prepare import prepare_voice

    config = load_config(EXAMPLE)
    rows = prepare_voice(config.data, config.voice, config.seed, lambda line: None)
    assert rows.eval is not None
    assert len(rows.train) == config.training.batch_size, "a step sees every row"
    assert [row.text for row in rows.eval] == [HELD_OUT] * 3
    told = {(row.speaker, row.text) for row in rows.train}
    assert {speaker for speaker, _ in told} == {row.speaker for row in rows.eval}
    assert len(told) == 18
    assert len({text for _, text in told} - {HELD_OUT}) == 6
    for row in (*rows.train, *rows.eval):
        assert row.reference_text not in (row.text, HELD_OUT)
        assert row.reference is not None
        assert row.reference.path.name.startswith(f"{row.speaker}-")


def test_the_loss_falls_from_the_first_steps(tmp_path: Path) -> None:
    _, summary, steps = train(
        tmp_path,
        *("training.max_steps=8", "training.batch_size=2", "training.warmup_steps=1", "data.max_rows=3"),
        *("training.logging_steps=1", "training.eval_steps=8", "data.eval_fraction=0.3"),
        *("voice.show=1", "voice.max_seconds=3"),
    )
    assert steps[-1]["audio_loss"] < steps[0]["audio_loss"] * 0.8
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "random numbers from a seed" in card
    assert "base_model:" not in card, "the hub knows no such model"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_says_what_it_was_taught_in_each_voice(tmp_path: Path) -> None:
    from trimtab.bench.evaluation import evaluated
    from trimtab.export.finished import read_run

    config, _, steps = train(tmp_path)
    assert steps[-1]["audio_loss"] <= steps[0]["audio_loss"] / 2

    run = read_run(tmp_path / "run")
    found = evaluated(config, run.folder, run.weights, data=None, rows=18, say=lambda line: None)["voice"]
    assert not found["missing"]
    trained = found["trained"]
    assert trained["rows"] == 18
    assert trained["ended"] == 18, "it has learned where a clip ends"
    assert trained["nearer_to_own"] == {"rows": 18, "of": 18}
    wrong = trained["word_error_rate"]
    # A recogniser that understood nothing would find all clips alike.
    assert wrong["true"] < 0.5
    assert wrong["coded"] < 0.5
    assert wrong["spoken"] <= 1.5 * wrong["coded"]
