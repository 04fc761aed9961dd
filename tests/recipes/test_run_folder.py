"""What a run may write over: its own list alone, after everything was checked, and by moving it aside."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.config import Config, load_config
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan
from trimtab.recipes.run_folder import RunFolder, failure_kept, open_run_folder
from trimtab.recipes.run_mark import MARK, Mark, claim
from trimtab.report.make import make_report, write_page

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def config_of(folder: Path, *words: str) -> Config:
    return load_config(None, [f"output_dir={folder}", *words])


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below the folder, with what it holds."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def finished(folder: Path, *words: str) -> RunFolder:
    """A run's folder as a training leaves it, with files of the user's own beside and inside."""
    config = config_of(folder, *words)
    run = open_run_folder(config)
    run.begin(config, PLAN, {"rows": 1})
    checkpoint = run.checkpoints / "checkpoint-4"
    for place in (checkpoint, run.checkpoints / "checkpoint-4-good", run.claim("adapter")):
        place.mkdir(parents=True)
        (place / "weights").write_text(place.name)
    (checkpoint / "trainer_state.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("")
    (folder / "adapter" / "notes.txt").write_text("mine, inside")
    (folder / "notes.txt").write_text("mine, beside")
    run.write_json("summary.json", {"status": "finished"})
    return run


def replaced(folder: Path) -> list[Path]:
    return sorted(folder.glob("replaced-*"))


def again(folder: Path, *words: str) -> list[str]:
    """A new run in the folder begins; what it says."""
    said: list[str] = []
    config = config_of(folder, "overwrite=true", *words)
    open_run_folder(config).begin(config, PLAN, {}, said.append)
    return said


def test_overwrite_moves_what_the_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finished(folder)
    before = contents(folder)
    config = config_of(folder, "overwrite=true")
    run = open_run_folder(config)
    assert contents(folder) == before, "opening only looks"
    said: list[str] = []
    run.begin(config, PLAN, {"rows": 2}, said.append)
    (aside,) = replaced(folder)
    assert len(said) == 1
    assert str(aside) in said[0]
    moved = contents(aside)
    # What the user put into the run's own folders went along; what lay beside them stayed.
    assert moved.keys() == before.keys() - {"notes.txt"}
    assert all(moved[name] == before[name] for name in moved.keys() - {MARK})
    assert (folder / "notes.txt").read_text() == "mine, beside"
    assert json.loads((folder / "data.json").read_text()) == {"rows": 2}
    assert not (folder / "adapter").exists()
    # It is a run as before, and can be looked at where it is.
    assert make_report(aside).facts["status"] == "finished"
    assert Mark.of(aside) is not None


def test_a_run_can_be_replaced_many_times_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "replaced-now")
    finished(tmp_path)
    for _ in range(3):
        again(tmp_path)
        (tmp_path / "summary.json").write_text("{}")
    assert [path.name for path in replaced(tmp_path)] == ["replaced-now", "replaced-now-2", "replaced-now-3"]
    assert (tmp_path / "replaced-now" / "adapter" / "notes.txt").is_file()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", ["model", "config.yaml", "data.json", "export", "stacks-rank1.txt"])
def test_a_name_that_a_run_needs_and_did_not_write_is_left_alone_and_named(
    tmp_path: Path, name: str, marked: bool
) -> None:
    if marked:
        finished(tmp_path)
        mark = Mark.of(tmp_path)
        assert mark is not None
        if name in mark.entries:  # as if the run had never written it
            Mark(tuple(n for n in mark.entries if n != name), True, mark.started).write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if name in ("model", "export"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("the user's")
    else:
        (tmp_path / name).write_text("the user's")
    before = contents(tmp_path)
    for words in (["overwrite=true"], [], ["training.resume=true"]):
        with pytest.raises(RequestError, match="not known to be a run's") as refused:
            open_run_folder(config_of(tmp_path, *words))
        assert f"holds {name}," in str(refused.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("setting", ["model", "data.source", "data.eval_source", "model.chat_template"])
def test_a_run_is_not_kept_where_it_reads_from(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    finished(folder)
    inside, link = folder / "checkpoints" / "checkpoint-4", tmp_path / "link"
    link.symlink_to(inside)
    (tmp_path / "also").symlink_to(folder)
    before = contents(folder)
    monkeypatch.chdir(folder)
    ways = [(folder, inside), (folder, folder), (folder, link), (tmp_path / "also", inside)]
    ways += [(Path("."), Path("checkpoints/checkpoint-4")), (folder, tmp_path / "also" / "adapter")]
    for out, path in ways:
        for word in ("overwrite=true", "overwrite=false"):
            with pytest.raises(RequestError, match=f"{setting}=.* lies inside output_dir="):
                open_run_folder(config_of(out, f"{setting}={path}", word))
    assert contents(folder) == before
    assert open_run_folder(config_of(folder, f"{setting}={inside}", "training.resume=true")).path == folder
    open_run_folder(config_of(tmp_path / "other", f"{setting}={inside}"))


def test_a_folder_of_the_users_own_may_hold_a_run(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("the user's")
    finished(tmp_path)
    again(tmp_path)
    assert (tmp_path / "sft.yaml").read_text() == "the user's"
    assert not (replaced(tmp_path)[0] / "sft.yaml").exists()


def test_a_run_of_an_earlier_version_is_resumed_but_not_replaced(tmp_path: Path) -> None:
    finished(tmp_path)
    (tmp_path / MARK).unlink()
    with pytest.raises(RequestError, match="an earlier version has no list"):
        open_run_folder(config_of(tmp_path, "overwrite=true"))
    for word in ("training.resume=true", f"training.resume={tmp_path / 'checkpoints' / 'checkpoint-4'}"):
        config = config_of(tmp_path, word)
        before = contents(tmp_path)
        run = open_run_folder(config)
        assert contents(tmp_path) == before
        run.begin(config, PLAN, {})
        run.claim("model")
        assert not (tmp_path / MARK).exists(), "who wrote what is not known"


def test_a_checkpoint_of_another_run_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    other = finished(tmp_path / "other").newest_checkpoint()
    finished(tmp_path / "run")
    with pytest.raises(RequestError, match="already holds a run"):
        open_run_folder(config_of(tmp_path / "run", f"training.resume={other}"))
    # The checkpoint lies below this folder, which is the user's own: nothing of theirs is written over.
    (tmp_path / "config.yaml").write_text("the user's")
    with pytest.raises(RequestError, match=r"holds config\.yaml"):
        open_run_folder(config_of(tmp_path, f"training.resume={other}"))
    config = config_of(tmp_path / "new", f"training.resume={other}")
    open_run_folder(config).begin(config, PLAN, {})
    assert "config.yaml" in Mark.of(tmp_path / "new").entries  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"entries": ["../sibling"]},
        {"entries": [".."]},
        {"entries": ["checkpoints/checkpoint-4"]},
        {"entries": "config.yaml summary.json"},
        {"entries": [3]},
        {"moving_to": "/"},
        None,
    ],
)
def test_a_list_that_cannot_be_trusted_moves_nothing(
    tmp_path: Path, change: dict[str, object] | None
) -> None:
    folder = tmp_path / "run"
    finished(folder)
    (tmp_path / "sibling").write_text("kept")
    text = (folder / MARK).read_text()
    (folder / MARK).write_text(text[:40] if change is None else json.dumps(json.loads(text) | change))
    before = contents(tmp_path)
    with pytest.raises(RequestError, match="not known to be a run's"):
        open_run_folder(config_of(folder, "overwrite=true"))
    claim(folder, "export")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moves", [0, 1, 3])
@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(16, "Device or resource busy")])
def test_a_move_that_is_cut_short_loses_nothing_and_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int, end: BaseException
) -> None:
    run = finished(tmp_path)
    before = {**contents(tmp_path)}
    config = config_of(tmp_path, "overwrite=true")
    rename, made = Path.rename, []

    def cut_short(self: Path, target: Path) -> Path:
        if len(made) == moves:
            raise end
        made.append(self.name)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut_short)
        wanted = KeyboardInterrupt if isinstance(end, KeyboardInterrupt) else RequestError
        opened = open_run_folder(config)
        with pytest.raises(wanted), failure_kept(opened, config, PLAN):
            opened.begin(config, PLAN, {})
    (aside,) = replaced(tmp_path)
    left = contents(tmp_path)
    kept = {name.removeprefix(f"{aside.name}/"): content for name, content in left.items()}
    assert {**kept, MARK: b""} == {**before, MARK: b""}
    if moves < 3:
        with pytest.raises(RequestError, match="already holds a run"):
            open_run_folder(config_of(tmp_path))
    again(tmp_path)
    assert replaced(tmp_path) == [aside]
    assert contents(aside).keys() == before.keys() - {"notes.txt"}
    assert run.path / "notes.txt" in tmp_path.iterdir()


def test_of_a_link_the_link_is_moved_and_leads_where_it_led(tmp_path: Path) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    run = finished(folder)
    run.checkpoints.rename(disk)
    run.checkpoints.symlink_to("../disk")
    (folder / "adapter" / "notes.txt").unlink()
    (folder / "adapter" / "notes.txt").symlink_to(tmp_path / "nowhere")
    before = contents(disk)
    again(folder)
    (aside,) = replaced(folder)
    assert contents(disk) == before
    assert (aside / "checkpoints").is_symlink()
    assert (aside / "checkpoints" / "checkpoint-4").is_dir()
    assert os.readlink(aside / "adapter" / "notes.txt") == str(tmp_path / "nowhere")
    assert not os.path.lexists(folder / "checkpoints")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_before_the_new_run_begins_leaves_the_earlier_one_as_it_is(
    tmp_path: Path, rank: int
) -> None:
    finished(tmp_path)
    before = contents(tmp_path)
    config = config_of(tmp_path, "overwrite=true")
    zero = open_run_folder(config)
    run = zero if rank == 0 else RunFolder(tmp_path)
    with pytest.raises(ValueError, match="no such data"), failure_kept(run, config, PLAN, rank):
        raise ValueError("no such data")
    assert contents(tmp_path) == before
    zero.begin(config, PLAN, {})
    with pytest.raises(ValueError, match="out of luck"), failure_kept(run, config, PLAN, rank):
        raise ValueError("out of luck")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    kept = json.loads((replaced(tmp_path)[0] / "summary.json").read_text())
    assert kept == {"status": "finished"}


def test_what_is_made_of_a_run_later_goes_onto_its_list(tmp_path: Path) -> None:
    finished(tmp_path)
    write_page(make_report(tmp_path), None)
    claim(tmp_path, "export")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.gguf").write_text("weights")
    again(tmp_path)
    (aside,) = replaced(tmp_path)
    assert (aside / "report.html").is_file()
    assert (aside / "export" / "model.gguf").is_file()
    # A folder of the user's own that was there first does not become the run's.
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").write_text("mine")
    claim(tmp_path, "export")
    with pytest.raises(RequestError, match="holds export, not known"):
        open_run_folder(config_of(tmp_path, "overwrite=true"))


WORDS = {
    "sft": ["data.eval_fraction=0.2"],
    "grpo": [
        "data=sums",
        "data.max_rows=16",
        "reward=format",
        "grpo.num_generations=4",
        "grpo.max_completion_length=6",
        "grpo.pattern=.",
    ],
    "zeroth_order": ["data=sample", "zeroth.task=sst2", "method=full"],
}


@pytest.mark.parametrize("recipe", WORDS)
def test_everything_that_a_recipe_writes_is_on_the_list(
    tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path, recipe: str
) -> None:
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    config.write_text(
        f"recipe: {recipe}\nmodel: {tiny_model}\ndata: {{source: {tiny_rows}, max_length: 96}}\ndevice: cpu\n"
        f"training: {{max_steps: 1, batch_size: 4}}\nmonitor: {{progress: none}}\noutput_dir: {run}\n"
    )
    words = ["train", str(config), *WORDS[recipe]]
    done = trimtab(*words)
    assert done.returncode == 0, done.stderr
    assert trimtab("report", str(run)).returncode == 0
    mark = Mark.of(run)
    assert mark is not None
    assert {path.name for path in run.iterdir()} - {MARK} <= set(mark.entries)
    before = contents(run)

    # A mistake that only shows when the data is read costs nothing, with overwrite either.
    for wrong in (["data=nowhere.jsonl"], ["training.max_stepz=3"], [f"model={run / 'adapter'}"], []):
        refused = trimtab(*words, "overwrite=true" if wrong else "overwrite=false", *wrong)
        assert refused.returncode == 2, refused.stderr
        assert contents(run) == before
    assert "another output_dir keeps both" in refused.stderr

    done = trimtab(*words, "overwrite=true", "seed=1")
    assert done.returncode == 0, done.stderr
    (aside,) = replaced(run)
    assert f"rm -r {aside}" in done.stdout
    moved = contents(aside)
    assert {name: moved[name] for name in before.keys() - {MARK}} == {
        n: before[n] for n in before if n != MARK
    }
    assert not (run / "report.html").exists()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(1) == [
        json.loads(line)["step"] for line in before["metrics.jsonl"].splitlines()
    ].count(1)


def test_an_empty_folder_in_a_files_place_and_a_link_to_nowhere_are_told_before_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "a" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(RequestError, match=r"holds metrics\.jsonl, not known to be a run's"):
        open_run_folder(config_of(tmp_path / "a"))
    (tmp_path / "b").symlink_to("nowhere")
    with pytest.raises(RequestError, match="it is a link to nowhere, which is not there"):
        open_run_folder(config_of(tmp_path / "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
