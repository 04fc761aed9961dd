"""`trimtab evaluate` on tiny runs of each recipe: the figures that the run found, and a folder that stays as it was."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tiny_processors import saved_pair
from trimtab.bench.evaluation import LOSS, evaluated, keep, lines
from trimtab.config import load_config
from trimtab.errors import RequestError
from trimtab.export.finished import read_run
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import EVALUATION, open_run_folder
from trimtab.recipes.run_mark import Mark
from voices import voice as made_up
from voices import write_clip


def train(*words: str) -> tuple[dict[str, Any], Path]:
    config = load_config(None, ["device=cpu", "monitor.progress=none", *words])
    assert config.output_dir is not None
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    return summary, Path(config.output_dir)


def judged(run: Path, data: str | None = None, rows: int | None = None) -> dict[str, Any]:
    finished = read_run(run)
    return evaluated(finished.config, run, finished.weights, data=data, rows=rows, say=lambda line: None)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sft_words(tiny_model: Path, tiny_rows: Path) -> list[str]:
    return [
        *(f"model={tiny_model}", f"data={tiny_rows}", "training.max_steps=4", "training.batch_size=8"),
        *("training.learning_rate=0.01", "samples.held_out=2", "samples.prompts=[hello]"),
    ]


@pytest.fixture(scope="module")
def sft(sft_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return train(*sft_words, f"output_dir={tmp_path_factory.mktemp('sft') / 'run'}")


def test_the_loss_and_the_score_are_those_of_the_run(sft: tuple[dict[str, Any], Path]) -> None:
    summary, run = sft
    before = contents(run)
    found = judged(run)
    assert contents(run) == before  # computed elsewhere, and nothing is kept until it is asked for
    loss = found["figures"][LOSS]
    assert loss["now"] == pytest.approx(summary["eval_loss"]["after"], rel=1e-5)
    assert {"before": loss["before"], "after": loss["after"]} == summary["eval_loss"]
    assert abs(loss["before"] - loss["after"]) > 0.01
    (name,) = summary["metrics"]
    assert name == "exact match on 2 held-out rows"
    assert found["figures"][name]["now"] == summary["metrics"][name]["after"]
    assert found["held_out_rows"] == summary["eval_rows"]
    table = "\n".join(lines(found))
    assert f"{loss['now']:.4f}" in table
    assert "before training" in table


def test_other_data_is_measured_without_the_figures_of_the_run(
    sft: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    _, run = sft
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"instruction": f"Say {n}", "output": f"{n}"}) for n in range(5)))
    found = judged(run, data=str(other), rows=3)
    assert found["held_out_rows"] == 5
    assert set(found["figures"][LOSS]) == {"now"}
    assert "exact match on 3 held-out rows" in found["figures"]
    assert "before training" not in "\n".join(lines(found))


def test_the_verb_prints_a_table_or_json_and_keeps_what_it_found(
    sft: tuple[dict[str, Any], Path], trimtab: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    summary, run = sft
    before = contents(run)
    done = trimtab("evaluate", str(run), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["figures"][LOSS]["now"] == pytest.approx(summary["eval_loss"]["after"], rel=1e-5)
    assert json.loads((run / EVALUATION).read_text()) == found
    mark = Mark.of(run)
    assert mark is not None
    assert EVALUATION in mark.entries
    changed = {name for name, content in contents(run).items() if before.get(name) != content}
    assert changed == {EVALUATION, ".trimtab-run.json"}
    again = trimtab("evaluate", str(run), "--rows", "0")  # in the place of the earlier one
    assert again.returncode == 0, again.stderr
    assert "held-out loss" in again.stdout
    assert "exact match" not in again.stdout


def test_a_file_of_the_users_is_never_written_over(sft_words: list[str], tmp_path: Path) -> None:
    _, run = train(*sft_words, "training.max_steps=1", f"output_dir={tmp_path / 'run'}")
    (run / EVALUATION).write_text('{"mine": 1}')
    with pytest.raises(RequestError, match="not written by an evaluation"):
        judged(run)
    with pytest.raises(RequestError, match="not written by an evaluation"):
        keep(run, {"kind": "any"})
    assert (run / EVALUATION).read_text() == '{"mine": 1}'


def test_all_weights_and_a_batch_of_several_processes(sft_words: list[str], tmp_path: Path) -> None:
    """What was agreed between processes does not bind the one that evaluates."""
    summary, run = train(
        *sft_words, "method=full", "training.effective_batch_size=8", f"output_dir={tmp_path / 'run'}"
    )
    text = (run / "config.yaml").read_text()
    told = text.replace("effective_batch_size: 8", "effective_batch_size: 64")
    assert told != text
    (run / "config.yaml").write_text(told)
    now = judged(run)["figures"][LOSS]["now"]
    assert now == pytest.approx(summary["eval_loss"]["after"], rel=1e-5)


def test_a_run_that_held_nothing_out_is_told_to_be_given_rows(sft_words: list[str], tmp_path: Path) -> None:
    words = [word for word in sft_words if not word.startswith("samples.")]
    _, run = train(*words, "data.eval_fraction=0", f"output_dir={tmp_path / 'run'}", "training.max_steps=1")
    with pytest.raises(RequestError, match="held nothing out"):
        judged(run)


def test_zeroth_order_by_its_own_evaluator(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    told = [{"sentence": f"film {n} is {'good' if n % 2 else 'bad'}", "label": n % 2} for n in range(30)]
    rows.write_text("\n".join(map(json.dumps, told)))
    summary, run = train(
        *("recipe=zeroth_order", f"model={tiny_model}", f"data={rows}", "zeroth.template={sentence}; it was"),
        *('zeroth.labels={0: " terrible", 1: " great"}', "training.max_steps=3", "training.batch_size=4"),
        *("training.learning_rate=0.001", f"output_dir={tmp_path / 'run'}"),
    )
    before = contents(run)
    figures = judged(run)["figures"]
    assert contents(run) == before
    assert figures[LOSS]["now"] == pytest.approx(summary["eval_loss"]["after"], rel=1e-5)
    assert figures["accuracy"]["now"] == summary["metrics"]["accuracy"]["after"]
    assert figures["accuracy"]["before"] == summary["metrics"]["accuracy"]["before"]


def test_rewards_of_held_out_prompts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"rewards_{abs(hash(str(tmp_path)))}"
    text = "def length(completions, **columns):\n    return [float(len(str(c))) for c in completions]\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    summary, run = train(
        *("recipe=grpo", f"model={tiny_model}", "data=sums", "data.max_rows=16", "data.eval_fraction=0.25"),
        *(
            f"reward={name}:length",
            "training.max_steps=1",
            "grpo.num_generations=4",
            "grpo.max_completion_length=4",
        ),
        f"output_dir={tmp_path / 'run'}",
    )
    figures = judged(run)["figures"]
    assert LOSS not in figures  # GRPO's says nothing of how good the completions are
    reward = figures["held-out reward"]
    assert reward["after"] == summary["metrics"]["held-out reward"]["after"]
    assert reward["now"] > 0
    assert figures["held-out reward length"]["now"] == pytest.approx(reward["now"])


DIFFUSION = ("vision.objective=masked_diffusion", "vision.answer_length=4", "vision.mask_token=<pad>")


@pytest.mark.parametrize("objective", [(), DIFFUSION], ids=["causal", "masked_diffusion"])
def test_pictures_by_the_metric_of_their_set(objective: tuple[str, ...], tmp_path: Path) -> None:
    model = saved_pair("llava_onevision", tmp_path / "llava")
    rows = []
    for number in range(10):
        colour = ("red", "blue")[number % 2]
        Image.new("RGB", (32 + number, 28), colour).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": "which colour?", "answer": colour})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary, run = train(
        *("recipe=vision", f"model={model}", f"data={tmp_path / 'rows.jsonl'}", "training.max_steps=2"),
        *("training.batch_size=4", "training.learning_rate=0.01", "data.eval_fraction=0.2"),
        *("samples.max_new_tokens=3", "samples.held_out=2", "data.max_length=256"),
        *objective,
        f"output_dir={tmp_path / 'run'}",
    )
    figures = judged(run)["figures"]
    assert figures[LOSS]["now"] == pytest.approx(summary["eval_loss"]["after"], rel=1e-4)
    (name,) = summary["metrics"]
    assert name.startswith("accuracy (")
    assert figures[name]["now"] == summary["metrics"][name]["after"]


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The built-in voice after two steps on made-up clips of two speakers; it says nothing that anybody understands."""
    folder = tmp_path_factory.mktemp("voice")
    rows = []
    for number in range(8):
        speaker, pitch = (("low", 110.0), ("high", 210.0))[number % 2]
        write_clip(folder / f"{number}.wav", made_up(number, 0.8, pitch))
        rows.append({"audio": f"{number}.wav", "text": f"this is clip {number}", "speaker": speaker})
    (folder / "metadata.json").write_text(json.dumps(rows))
    return train(
        *("recipe=voice", f"data={folder}", "training.max_steps=2", "training.batch_size=3", "method=full"),
        *("data.eval_fraction=0.25", "data.max_length=256", "voice.max_seconds=1", "voice.show=0"),
        *("voice.temperature=0", "voice.codec=spectral", f"output_dir={folder / 'run'}"),
    )


def test_a_voice_speaks_rows_of_both_parts(
    voice: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pocketsphinx", "resemblyzer"):
        monkeypatch.setitem(sys.modules, name, None)
    summary, run = voice
    before = contents(run)
    found = judged(run, rows=3)
    assert contents(run) == before
    assert found["figures"][LOSS]["now"] == pytest.approx(summary["eval_loss"]["after"], rel=1e-4)
    told = found["voice"]
    assert (told["trained"]["rows"], told["held_out"]["rows"]) == (3, min(3, summary["eval_rows"]))
    assert told["speakers"] == ["high", "low"]
    assert {row["speaker"] for row in told["rows"] if row["trained"]} == {"high", "low"}
    assert all(row["seconds"] <= 1.1 for row in told["rows"])
    assert len(told["missing"]) == 2
    assert json.dumps(told)
    figures = found["figures"]
    books = [figures[f"audio_loss_{book}"]["now"] for book in range(8)]
    assert figures["audio_loss"]["now"] == pytest.approx(sum(books) / 8, rel=1e-3)
    assert not [name for name in figures if "time" in name or "second" in name]
    table = "\n".join(lines(found))
    assert "audio_loss " in table
    assert "audio_loss_0" not in table
    assert "voice" not in judged(run, rows=0)


def test_a_voice_on_other_clips_still_tells_what_was_trained_on(
    voice: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pocketsphinx", "resemblyzer"):
        monkeypatch.setitem(sys.modules, name, None)
    summary, run = voice
    write_clip(tmp_path / "new.wav", made_up(99, 0.7, 150.0))
    row = {"audio": "new.wav", "text": "something new", "speaker": "another"}
    (tmp_path / "metadata.json").write_text(json.dumps([row]))
    own, found = judged(run, rows=9)["voice"], judged(run, data=str(tmp_path), rows=9)["voice"]
    assert own["trained"]["rows"] == found["trained"]["rows"] == summary["train_rows"]
    assert [r["text"] for r in found["rows"] if not r["trained"]] == ["something new"]
    assert found["speakers"] == ["another", "high", "low"]
    held = {r["text"] for r in own["rows"] if not r["trained"]}
    assert held.isdisjoint(r["text"] for r in found["rows"])


def test_a_voice_is_judged_with_the_codec_that_was_learned_for_it(
    voice: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    _, run = voice
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "codec")
    with pytest.raises(RequestError, match="keeps no codec"):
        judged(tmp_path / "run", rows=1)
