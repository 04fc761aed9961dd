"""A run goes on from its newest whole checkpoint, says what it skipped and why, and deletes nothing but its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from trimtab.config import Config, load_config
from trimtab.errors import RequestError, TrimtabError
from trimtab.manifest import MANIFEST
from trimtab.recipes.checkpoints import (
    begin_saving,
    by_step,
    checkpoint_to_resume,
    clear_leftovers,
    fault,
    new_checkpoint,
    rotate,
)
from trimtab.recipes.kept_folder import check_kept, clear_half_made, whole_kept
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import RunFolder, open_run_folder
from trimtab.recipes.run_mark import Mark

Damage = Callable[[Path], object]


def train(words: list[str], *more: str) -> tuple[Path, list[str]]:
    config, said = load_config(None, [*words, *more]), []
    run_recipe(config, plan_run(config).plan, open_run_folder(config), said.append)
    assert config.output_dir is not None
    return Path(config.output_dir), said


@pytest.fixture(scope="module")
def words(
    tiny_model: Path, tiny_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    labelled = tmp_path_factory.mktemp("labelled") / "rows.jsonl"
    rows = [{"sentence": f"film {n} is " + ("good" if n % 2 else "bad"), "label": n % 2} for n in range(20)]
    labelled.write_text("\n".join(map(json.dumps, rows)))
    every = [
        *(f"model={tiny_model}", "device=cpu", "monitor.progress=none", "training.max_steps=6"),
        *("training.save_steps=2", "training.batch_size=4", "training.learning_rate=0.01"),
        *("training.save_total_limit=null", "samples.prompts=[]", "samples.held_out=0"),
    ]
    return {
        # Three steps an epoch, and rows in groups: their order in the second epoch has to come back as well.
        "sft": [
            *(
                "recipe=sft",
                f"data={tiny_rows}",
                "data.max_rows=12",
                "data.eval_fraction=0",
                "lora.dropout=0.1",
            ),
            *("training.keep_best=false", "training.group_by_length=true", *every),
        ],
        "zeroth_order": [
            *(
                "recipe=zeroth_order",
                f"data={labelled}",
                "zeroth.interval=2",
                "zeroth.projection_iterations=2",
            ),
            *("zeroth.template={sentence}; it was", 'zeroth.labels={0: " bad", 1: " good"}', *every),
        ],
    }


@pytest.fixture(scope="module")
def trained(words: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of both kinds of checkpoint; to be copied."""
    made = tmp_path_factory.mktemp("trained")
    return {name: train(own, f"output_dir={made / name}")[0] for name, own in words.items()}


def copy_of(run: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(run, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def config_of(run: RunFolder, resume: str = "true") -> Config:
    return load_config(None, ["device=cpu", f"output_dir={run.path}", f"training.resume={resume}"])


def flip(name: str, at: int = -1) -> Damage:
    def flipped(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return flipped


def delete(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def empty(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(b"")


def leads_out(folder: Path) -> None:
    found = json.loads((folder / MANIFEST).read_text())
    found["files"]["../../config.yaml"] = {"size": 1, "sha256": "0"}
    (folder / MANIFEST).write_text(json.dumps(found))


TRAINERS = [
    (delete("optimizer.pt"), "optimizer.pt is missing"),
    (delete("scheduler.pt"), "scheduler.pt is missing"),
    (delete("rng_state.pth"), "rng_state.pth is missing"),
    (
        flip("adapter_model.safetensors"),
        "adapter_model.safetensors: its content has changed since it was written",
    ),
    (flip("optimizer.pt", 5000), "optimizer.pt: its content has changed since it was written"),
    (empty("trainer_state.json"), "trainer_state.json has 0 bytes, and had "),
    (empty(MANIFEST), f"{MANIFEST} cannot be read: it was cut short or changed"),
    (leads_out, "names '../../config.yaml', which lies outside of the folder"),
]
OWN = [
    (delete("weights.safetensors"), "weights.safetensors is missing"),
    (delete("state.json"), "state.json is missing"),
    (delete("anchors.safetensors"), "anchors.safetensors is missing"),
    (flip("weights.safetensors"), "weights.safetensors: its content has changed since it was written"),
    (empty("state.json"), "state.json has 0 bytes"),
    (empty(MANIFEST), f"{MANIFEST} cannot be read"),
    (leads_out, "which lies outside of the folder"),
]
CASES = [("sft", *case) for case in TRAINERS] + [("zeroth_order", *case) for case in OWN]


@pytest.mark.parametrize(("recipe", "damage", "reason"), CASES)
def test_a_damaged_checkpoint_is_named_and_skipped_and_refused_where_it_is_asked_for(
    recipe: str, damage: Damage, reason: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    run, said = copy_of(trained[recipe], tmp_path), []
    newest = run.checkpoints / "checkpoint-6"
    damage(newest)
    assert checkpoint_to_resume(config_of(run), run, said.append) == run.checkpoints / "checkpoint-4"
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint-6 skipped: {reason.split(': ')[0]}") or reason in said[0]
    assert reason in said[0]
    with pytest.raises(RequestError, match="the checkpoint is damaged") as refused:
        checkpoint_to_resume(config_of(run, str(newest)), run, said.append)
    assert reason in str(refused.value)
    for folder in by_step(run.checkpoints).values():
        if folder != newest:
            damage(folder)
    with pytest.raises(RequestError, match=r"no checkpoint in .* is whole") as none:
        checkpoint_to_resume(config_of(run), run, said.append)
    assert [f"checkpoint-{n}: " in str(none.value) for n in (2, 4, 6)] == [True] * 3


@pytest.mark.parametrize("recipe", ["sft", "zeroth_order"])
def test_the_run_goes_on_from_the_older_one_to_the_same_weights(
    recipe: str, words: dict[str, list[str]], trained: dict[str, Path], tmp_path: Path
) -> None:
    run = copy_of(trained[recipe], tmp_path)
    shutil.rmtree(run.path / "adapter")
    flip("adapter_model.safetensors" if recipe == "sft" else "weights.safetensors")(
        run.checkpoints / "checkpoint-6"
    )
    again, said = train(words[recipe], f"output_dir={run.path}", "training.resume=true")
    assert any(line.startswith("checkpoint-6 skipped") for line in said)
    left, right = (load_file(p / "adapter" / "adapter_model.safetensors") for p in (again, trained[recipe]))
    assert all(left[name].equal(right[name]) for name in right)
    # What was damaged is not deleted, and the step has a whole checkpoint again.
    assert fault(run.checkpoints / "checkpoint-6-set-aside") is not None
    assert fault(run.checkpoints / "checkpoint-6", run.path) is None
    steps = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["phase"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_bit_of_the_trajectory_costs_the_checkpoints_after_it(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    run, said = copy_of(trained["zeroth_order"], tmp_path), []
    flip("trajectory.bin")(run.path)
    assert checkpoint_to_resume(config_of(run), run, said.append) == run.checkpoints / "checkpoint-4"
    assert "trajectory.bin, which it relies on: its content has changed" in said[0]
    flip("trajectory.bin", 5)(run.path)
    with pytest.raises(RequestError, match=r"no checkpoint in .* is whole"):
        checkpoint_to_resume(config_of(run), run, said.append)
    from trimtab.recipes.replay import replay_run

    flip("trajectory.bin", 5)(run.path)
    with pytest.raises(RequestError, match="its content has changed since checkpoint-6 was written"):
        replay_run(run.path)


WITHOUT_MANIFEST: list[tuple[str, Damage, str | None]] = [
    ("sft", lambda folder: None, None),
    ("sft", empty("trainer_state.json"), "trainer_state.json is empty"),
    ("sft", delete("optimizer.pt"), "optimizer.pt is missing"),
    ("sft", delete("rng_state.pth"), "rng_state.pth is missing"),
    ("sft", flip("optimizer.pt", 5000), "optimizer.pt: its content has changed"),
    ("sft", empty("scheduler.pt"), "scheduler.pt is cut short"),
    (
        "sft",
        lambda f: (f / "adapter_model.safetensors").write_bytes(
            (f / "adapter_model.safetensors").read_bytes()[:-9]
        ),
        "adapter_model.safetensors has ",
    ),
    ("zeroth_order", lambda folder: None, None),
    (
        "zeroth_order",
        lambda folder: (folder / "state.json").write_text('{"progress": 3}'),
        "tells nothing of the",
    ),
    ("zeroth_order", empty("weights.safetensors"), "weights.safetensors is cut short"),
]


@pytest.mark.parametrize(("recipe", "damage", "reason"), WITHOUT_MANIFEST)
def test_a_checkpoint_of_an_earlier_version_is_looked_at_as_far_as_it_goes(
    recipe: str, damage: Damage, reason: str | None, trained: dict[str, Path], tmp_path: Path
) -> None:
    run, said = copy_of(trained[recipe], tmp_path), []
    newest = run.checkpoints / "checkpoint-6"
    (newest / MANIFEST).unlink()
    damage(newest)
    found = checkpoint_to_resume(config_of(run), run, said.append)
    if reason is None:
        assert found == newest
        assert "an earlier version wrote it" in said[0]
    else:
        assert found == run.checkpoints / "checkpoint-4"
        assert reason in said[0]


@pytest.mark.parametrize("recipe", ["sft", "zeroth_order"])
def test_a_best_checkpoint_that_is_damaged_is_said_and_not_kept(
    recipe: str, words: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the run that made it, and at the next start."""
    from trimtab.recipes import loop_driver, trainer_saving

    held = [
        "data.eval_fraction=0.2",
        "training.eval_steps=2",
        "training.keep_best=true",
        "training.max_steps=4",
    ]
    settings = [*words[recipe], *held, "training.learning_rate=0.3", f"output_dir={tmp_path / 'run'}"]
    damaged: list[Path] = []

    def check(folder: Path, run: Path) -> None:
        name = "adapter_model.safetensors" if recipe == "sft" else "weights.safetensors"
        flip(name)(folder)
        damaged.append(folder)
        real(folder, run)

    module: Any = trainer_saving if recipe == "sft" else loop_driver
    real = module.check_best
    monkeypatch.setattr(module, "check_best", check)
    if recipe == "zeroth_order":
        from trimtab.recipes.zeroth_order import ZerothEngine

        losses = {0: 0.7, 2: 0.6, 4: 0.9}
        monkeypatch.setattr(
            ZerothEngine, "measure", lambda self, _: {"loss": losses[self.optimizer.step_number]}
        )
    with pytest.raises(TrimtabError, match=r"the best checkpoint, .* is damaged"):
        train(settings)
    assert not (tmp_path / "run" / "adapter").exists()
    monkeypatch.setattr(module, "check_best", real)
    run, said = train(settings, "training.resume=true")
    newest_is_best = damaged[0].name == "checkpoint-4"
    told = (
        "checkpoint-4 skipped" if newest_is_best else "the best checkpoint so far, checkpoint-2, is damaged"
    )
    assert any(told in line for line in said)
    assert (run / "adapter" / "adapter_model.safetensors").exists()


def make(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        with new_checkpoint(checkpoints, step) as folder:
            (folder / "state.json").write_text(str(step))


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, None, {30, 40}),
        (1, 10, {10, 40}),
        (None, None, {10, 20, 30, 40}),
        (2, 10, {10, 40}),
        (1, None, {40}),
    ],
)
def test_the_oldest_go(keep: int | None, best: int | None, left: set[int], tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 40)
    rotate(tmp_path, keep, best)
    assert by_step(tmp_path).keys() == left
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in left}


def test_what_is_not_known_to_be_ours_stays(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 40, 50)
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-10-good")
    (tmp_path / "checkpoint-10" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-20" / MANIFEST).unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint-30").rename(tmp_path / "elsewhere" / "checkpoint-30")
    (tmp_path / "checkpoint-30").symlink_to(tmp_path / "elsewhere" / "checkpoint-30")
    rotate(tmp_path, 1)
    left = {
        "checkpoint-10",
        "checkpoint-10-good",
        "checkpoint-20",
        "checkpoint-30",
        "checkpoint-50",
        "elsewhere",
    }
    assert {path.name for path in tmp_path.iterdir()} == left
    assert (tmp_path / "elsewhere" / "checkpoint-30" / "state.json").exists()


def test_the_last_whole_one_never_goes(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    delete("state.json")(tmp_path / "checkpoint-20")
    delete("state.json")(tmp_path / "checkpoint-30")
    rotate(tmp_path, 1)
    assert fault(tmp_path / "checkpoint-10") is None


def test_what_a_kill_left_is_cleared_where_it_is_ours(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (begin_saving(tmp_path, 20) / "checkpoint-20").mkdir()
    (tmp_path / ".saving-30.partial").mkdir()
    (tmp_path / ".saving-40.partial" / "mine").mkdir(parents=True)
    (tmp_path / "checkpoint-10").rename(tmp_path / ".removing-checkpoint-10.partial")
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".saving-40.partial"]


def test_an_error_while_saving_leaves_the_room_free_and_the_older_one_whole(tmp_path: Path) -> None:
    make(tmp_path, 10)

    def stop_half_way() -> None:
        with new_checkpoint(tmp_path, 20) as folder:
            (folder / "state.json").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        stop_half_way()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


def keep(run: Path, content: str, said: list[str]) -> None:
    with whole_kept(run / "adapter", said.append) as folder:
        (folder / "adapter_model.safetensors").write_text(content)


def test_kept_weights_are_replaced_whole_and_what_others_put_there_is_set_aside(tmp_path: Path) -> None:
    said: list[str] = []
    keep(tmp_path, "one", said)
    (tmp_path / "adapter" / "README.md").write_text("the card")
    keep(tmp_path, "two", said)
    assert (sorted(path.name for path in tmp_path.iterdir()), said) == (["adapter"], [])
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    keep(tmp_path, "three", said)
    assert (tmp_path / "adapter-set-aside" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_text() == "three"
    assert "it is now adapter-set-aside/" in said[0]


def test_kept_weights_that_changed_are_refused(tmp_path: Path) -> None:
    keep(tmp_path, "weights", [])
    check_kept(tmp_path / "adapter")
    flip("adapter_model.safetensors")(tmp_path / "adapter")
    with pytest.raises(RequestError, match="its content has changed since it was written"):
        check_kept(tmp_path / "adapter")


def test_a_kill_between_two_kept_folders_gives_the_old_one_back(tmp_path: Path) -> None:
    Mark(("adapter", "summary.json"), began=True).write(tmp_path)
    keep(tmp_path, "one", [])
    (tmp_path / "adapter").rename(tmp_path / ".adapter.0a1b2c3d.old")
    (tmp_path / ".adapter.0a1b2c3d.partial").mkdir()
    (tmp_path / ".summary.json.0a1b2c3d.partial").write_text("{")
    (tmp_path / ".notes.txt.0a1b2c3d.partial").write_text("not on the list")
    clear_half_made(tmp_path, print)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_text() == "one"
    left = {".trimtab-run.json", "adapter", ".notes.txt.0a1b2c3d.partial"}
    assert {path.name for path in tmp_path.iterdir()} == left
