"""A run that goes on is held to what it began with: every recipe, its settings, and what shapes it besides."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from trimtab.config import load_config
from trimtab.files import write_json_whole
from trimtab.placement import PlacementPlan
from trimtab.recipes.begun_with import GoingOn
from trimtab.recipes.starts import Start

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "starts.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def stopped(
    tiny_model: Path, tiny_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run of four steps with a checkpoint at each second, as a kill after step 3 leaves it; its words."""
    from trimtab.config import load_config
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run import run_recipe
    from trimtab.recipes.run_folder import open_run_folder

    place = tmp_path_factory.mktemp("stopped")
    rows = place / "rows.jsonl"
    shutil.copy(tiny_rows, rows)
    (place / "base.yaml").write_text("recipe: sft")
    words = [
        *(f"model={tiny_model}", f"data={rows}", "device=cpu", "monitor.progress=none", "samples.prompts=[]"),
        *("training.max_steps=4", "training.batch_size=8", "training.learning_rate=0.01"),
        *("training.save_steps=2", "training.eval_steps=2", "training.save_total_limit=null"),
    ]
    config = load_config(None, [*words, f"output_dir={place / 'run'}"])
    run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    shutil.rmtree(place / "run" / "checkpoints" / "checkpoint-4")
    return place / "run", [str(place / "base.yaml"), *words]


@pytest.fixture
def run(stopped: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy of the run, to go on with."""
    return shutil.copytree(stopped[0], tmp_path / "run")


@pytest.fixture
def words(stopped: tuple[Path, list[str]], run: Path) -> list[str]:
    return ["train", *stopped[1], f"output_dir={run}", "training.resume=true"]


def test_another_way_to_compute_a_step_is_said(trimtab: Trimtab, run: Path, words: list[str]) -> None:
    """As where the run began on a GPU whose layers were compiled."""
    kept = record(run)
    kept["now"]["facts"]["plan"]["speed"]["compile"] = True
    (run / "starts.json").write_text(json.dumps(kept), encoding="utf-8")
    done = trimtab(*words)
    assert done.returncode == 0, done.stderr
    assert "computed otherwise than before, equal up to rounding: compile true → false" in done.stdout


def test_all_that_is_not_sound_is_refused_at_once_and_nothing_is_touched(
    trimtab: Trimtab, run: Path, words: list[str]
) -> None:
    before = hashes(run)
    changed = {
        "training.learning_rate": ("0.01", "0.02"),
        "training.lr_scheduler": ('"cosine"', '"linear"'),
        "training.warmup_steps": ("null", "1"),
        "training.weight_decay": ("0.0", "0.1"),
        "training.max_grad_norm": ("1.0", "0.5"),
        "training.optimizer": ('"auto"', '"sgd"'),
        "training.group_by_length": ("false", "true"),
        "seed": ("0", "3"),
        "lora.r": ("16", "8"),
        "lora.targets": ('"all-linear"', '"attention"'),
        "data.max_length": ("1024", "64"),
        "data.train_on": ('"answers"', '"all"'),
    }
    plain = [f"{key}={now}".replace('"', "") for key, (_, now) in changed.items()]
    done = trimtab(
        *words, *plain, "training.batch_size=4", "training.logging_steps=3", "data.eval_fraction=0.2"
    )
    assert done.returncode == 2
    for key, (was, now) in changed.items():
        assert f"{key} ".ljust(12) in done.stderr
        assert f"was {was}, is now {now}" in done.stderr
    assert "was 8 × 1 × 1 = 8, is now 4 × 1 × 1 = 4; training.gradient_accumulation_steps=2" in done.stderr
    assert "data.eval_fraction" in done.stderr, "it may be why the rows are others"
    assert "training.logging_steps" not in done.stderr, "that is sound"
    assert f"trimtab train {run}/config.yaml training.resume=true" in done.stderr
    assert hashes(run) == before


def test_an_end_before_the_step_reached_is_refused(trimtab: Trimtab, run: Path, words: list[str]) -> None:
    before = hashes(run)
    done = trimtab(*words, "training.max_steps=1")
    assert done.returncode == 2
    assert "training.max_steps  was 4, is now 1 (step 2 is reached already)" in done.stderr
    assert hashes(run) == before


def test_what_is_sound_is_said_recorded_and_carried_out(
    trimtab: Trimtab, run: Path, words: list[str]
) -> None:
    began = record(run)["began"]
    more = [
        "training.max_steps=6",
        "training.save_steps=1",
        "training.eval_steps=1",
        "training.logging_steps=3",
    ]
    done = trimtab(*words, *more, "training.batch_size=4", "training.gradient_accumulation_steps=2")
    assert done.returncode == 0, done.stderr
    assert "training.save_steps was 2, is now 1" in done.stdout
    assert "the run ends at step 6 instead of step 4: the schedule `cosine` is stretched" in done.stdout
    # Halfway down the cosine at step 2 of 4 after one step of warm-up; a third of the way at step 2 of 6.
    assert "at step 2 of 6 it is 0.00905, and was 0.0075 at step 2 of 4" in done.stdout
    assert "a step's rows were 8 × 1 × 1 = 8, are now 4 × 1 × 2 = 8: the same rows" in done.stdout
    steps = sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoints/checkpoint-*"))
    assert steps == [2, 3, 4, 5, 6], "saved in the new rhythm"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "train" and line["step"] > 2] == [3, 6]
    kept = record(run)
    assert kept["began"] == began, "what it began with stays as it was"
    (entry,) = kept["went_on"]
    assert entry["step"] == 2
    assert entry["checkpoint"] == "checkpoint-2"
    assert entry["changed"]["training.max_steps"] == {"was": 4, "now": 6}
    # What the folder keeps resumes it, and it is what the run is now.
    again = trimtab("train", str(run / "config.yaml"), "training.resume=true", "training.max_steps=7")
    assert again.returncode == 0, again.stderr
    assert [entry["step"] for entry in record(run)["went_on"]] == [2, 6]


def test_other_rows_are_refused_by_file_and_taken_on_request(
    trimtab: Trimtab, run: Path, words: list[str], tmp_path: Path
) -> None:
    source = next(word for word in words if word.startswith("data=")).removeprefix("data=")
    rows = Path(source).read_text(encoding="utf-8")
    before = hashes(run)
    # The same rows in another place are the same.
    moved = tmp_path / "moved.jsonl"
    moved.write_text(rows.replace("\n", "\n\n"), encoding="utf-8")
    done = trimtab(*words, f"data={moved}")
    assert done.returncode == 0, done.stderr
    assert "the content is the same" in done.stdout
    assert hashes(run) != before
    moved.write_text(rows.replace("plus 3", "plus 9"), encoding="utf-8")
    now = hashes(run)
    done = trimtab(*words, f"data={moved}")
    assert done.returncode == 2
    assert "rows to train on" in done.stderr
    assert "was 36, is now 36 of other content" in done.stderr
    assert "data.source: moved.jsonl" in done.stderr
    assert "training.resume_changed=data takes the new one from here on" in done.stderr
    moved.write_text(rows + "\n" + rows.replace("What is", "How much is"), encoding="utf-8")
    assert "was 36, is now 72" in trimtab(*words, f"data={moved}").stderr
    assert hashes(run) == now
    done = trimtab(*words, f"data={moved}", "training.resume_changed=data", "training.max_steps=5")
    assert done.returncode == 0, done.stderr
    assert "! rows to train on: 36 before, 72 now, taken from here on" in done.stdout


def test_another_model_under_the_same_name_and_another_template_are_refused(
    trimtab: Trimtab, run: Path, words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(tiny_model, tmp_path / "model")
    # Moved, it is the same model.
    assert trimtab(*words, f"model={copied}", "training.max_steps=2").returncode == 0
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    before = hashes(run)
    done = trimtab(*words, f"model={copied}")
    assert done.returncode == 2
    assert "the base model's files  was as the run began, is now another config.json" in done.stderr
    template = "{% for m in messages %}{{ m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    (tmp_path / "other.jinja").write_text(template)
    done = trimtab(*words, f"model.chat_template={tmp_path / 'other.jinja'}")
    assert done.returncode == 2
    assert re.search("the chat template +was as the run began, is now another", done.stderr)
    assert "model.chat_template" in done.stderr
    assert hashes(run) == before


def test_a_folder_that_was_moved_goes_on_where_it_lies_with_its_best_checkpoint(
    trimtab: Trimtab, run: Path, stopped: tuple[Path, list[str]]
) -> None:
    """Its config.yaml names the old folder, which is still there: that one is left alone."""
    first, before = stopped[0], hashes(stopped[0])
    done = trimtab("train", str(run / "config.yaml"), "training.resume=true", "training.learning_rate=0.01")
    assert done.returncode == 0, done.stderr
    assert f"names output_dir={first}, but lies in {run}: the run goes on there" in done.stdout
    assert hashes(first) == before
    state = json.loads((run / "checkpoints" / "checkpoint-4" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).parent == run / "checkpoints"


def test_a_config_changed_by_hand_is_told_apart_from_the_record(trimtab: Trimtab, run: Path) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.01", "learning_rate: 0.05"))
    before = hashes(run)
    done = trimtab("train", str(file), "training.resume=true")
    assert done.returncode == 2
    assert f"put back what was changed in {file}" in done.stderr
    assert hashes(run) == before


def test_a_run_of_an_earlier_version_is_compared_as_far_as_it_tells(
    trimtab: Trimtab, run: Path, words: list[str]
) -> None:
    (run / "starts.json").unlink()
    before = hashes(run)
    done = trimtab(*words, "seed=1")
    assert done.returncode == 2
    assert "seed  was 0, is now 1" in done.stderr
    assert trimtab(*words, "data.max_rows=20").returncode == 2, "names count where the content is not known"
    assert hashes(run) == before
    done = trimtab(*words)
    assert done.returncode == 0, done.stderr
    assert "was begun by an earlier version: compared with what its config.yaml" in done.stdout
    kept = record(run)
    assert kept["began"]["version"] == "earlier"
    assert kept["now"]["facts"]["train"]["rows"] == 36


def test_a_record_that_is_none_is_not_written_over(trimtab: Trimtab, run: Path, words: list[str]) -> None:
    kept = record(run)
    shapes: list[Any] = [[1, 2], {"format": 2}, {**kept, "now": 3}, {**kept, "went_on": None}]
    shapes += [{**kept, "now": {**kept["now"], "facts": {"plan": {}}}}]
    shapes += [{**kept, "now": {**kept["now"], "facts": {"files": {"data.source": [1]}}}}]
    shapes += [{**kept, "now": {"facts": {}, "config": {"seed": "no number"}}}]
    for shape in ["{", *map(json.dumps, shapes)]:
        (run / "starts.json").write_text(shape)
        before = hashes(run)
        done = trimtab(*words)
        assert done.returncode == 2, shape
        assert (
            "not a record of a run's starts" in done.stderr or "is not what this version takes" in done.stderr
        )
        assert hashes(run) == before
    # Settings that a later version knows are left out, those that an earlier one did not know have their defaults.
    del kept["now"]["config"]["monitor"]
    kept["now"]["config"]["training"]["of_tomorrow"] = 1
    (run / "starts.json").write_text(json.dumps(kept))
    assert trimtab(*words).returncode == 0


def test_a_checkpoint_of_another_run_is_held_to_that_run(
    trimtab: Trimtab, run: Path, stopped: tuple[Path, list[str]], tmp_path: Path
) -> None:
    other, checkpoint = tmp_path / "other", run / "checkpoints" / "checkpoint-2"
    words = ["train", *stopped[1], f"output_dir={other}", f"training.resume={checkpoint}"]
    done = trimtab(*words, "training.learning_rate=0.02")
    assert done.returncode == 2
    assert f"trimtab train {run}/config.yaml training.resume={checkpoint} output_dir={other}" in done.stderr
    before = hashes(run)
    assert trimtab(*words).returncode == 0
    assert hashes(run) == before
    assert record(other)["began"]["checkpoint"] == str(checkpoint)
    straight = load_file(stopped[0] / "adapter" / "adapter_model.safetensors")
    assert load_file(other / "adapter" / "adapter_model.safetensors").keys() == straight.keys()
    # Where nothing tells what its run began with, that is said.
    alone = shutil.copytree(checkpoint, tmp_path / "alone" / "checkpoint-2")
    done = trimtab(*words[:-1], f"training.resume={alone}", f"output_dir={tmp_path / 'third'}")
    assert done.returncode == 0, done.stderr
    assert "nothing beside it tells what its run began with; not compared" in done.stdout


def test_what_the_record_hides_is_no_difference(tiny_model: Path, tmp_path: Path) -> None:
    said = "Answer as the clerk who asks for `password: swordfish77` and git clone https://me:word@host."
    config = load_config(None, ["recipe=grpo", f"model={tiny_model}", "reward=answer", f"grpo.system={said}"])
    plan = PlacementPlan(
        device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single"
    )
    now = Start.now(config, plan)
    kept = {"format": 1, "began": now.as_dict(), "went_on": [], "now": now.as_dict()}
    write_json_whole(tmp_path / "starts.json", kept)
    assert "swordfish" not in (tmp_path / "starts.json").read_text()
    going_on = GoingOn.of(tmp_path / "checkpoints" / "checkpoint-2")
    assert going_on is not None
    going_on.check_request(now)
    assert going_on.found.changed == {}
