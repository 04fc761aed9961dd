"""What a run will write: the estimate beside the true bytes of runs; a disk too small for it is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.errors import RequestError
from trimtab.file_system import FileSystem, amount, file_system_of, nearest, size_of
from trimtab.recipes import disk_needs, room_on_disk
from trimtab.recipes import run as run_page
from trimtab.recipes.disk_needs import checkpoints_at_once
from trimtab.recipes.planning import plan_run
from trimtab.recipes.room_on_disk import Room

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ["device=cpu", "monitor.progress=none", "training.save_steps=1", "training.save_total_limit=null"]
TEXT = ["data.eval_fraction=0.1", "training.batch_size=8", "training.max_steps=2", "training.eval_steps=1"]
RUNS = {
    "sft": ["training.optimizer=adamw_torch", *TEXT],
    "sft, with the head": ["lora.targets=[lm_head,q_proj]", *TEXT],
    "sft, all weights, exported": ["method=full", "export.to=gguf", "training.optimizer=adafactor", *TEXT],
    "zeroth order": [
        *(
            "recipe=zeroth_order",
            "zeroth.task=sst2",
            "zeroth.method=dizo",
            "data=sample",
            "data.max_length=64",
        ),
        *("data.max_rows=16", "training.max_steps=2", "zeroth.interval=1", "zeroth.projection_iterations=1"),
    ],
    "grpo": [
        *("recipe=grpo", "data.source=sums", "data.max_rows=8", "data.max_length=64", "reward=length"),
        *(
            "grpo.num_generations=4",
            "grpo.max_completion_length=4",
            "training.batch_size=4",
            "training.max_steps=2",
        ),
    ],
}
SLOW = {
    "vision": [
        *("recipe=vision", "model=tiny-vision", "method=full", "data=drawn-pictures", "data.max_rows=24"),
        *("data.max_length=64", "training.max_steps=2", "samples.held_out=2", "training.batch_size=4"),
    ],
    "voice": [
        *("recipe=voice", "model=tiny-voice", "method=full", "data=espeak-voices", "data.max_length=256"),
        *("training.max_steps=1", "training.batch_size=4", "voice.codec=spectral", "voice.max_seconds=6"),
    ],
    "the built-in model": ["model=smollm2", "data=device-errors", "data.max_rows=16", *TEXT],
}


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[Room]:
    """Every estimate that the run made: the last one knew the data."""
    made: list[Room] = []
    real = disk_needs.room_for

    def noted(*args: Any, **more: Any) -> Room:
        made.append(real(*args, **more))
        return made[-1]

    monkeypatch.setattr(disk_needs, "room_for", noted)
    monkeypatch.setattr(run_page, "room_for", noted)
    return made


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_estimate_is_never_below_what_a_run_wrote(
    name: str, tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path, estimates: list[Room]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {tiny_model}\ndata: {tiny_rows}\n")
    words = [*SMALL, *(RUNS | SLOW)[name], f"output_dir={tmp_path / 'run'}"]
    done = trimtab("train", str(config), *words)
    assert done.returncode == 0, done.stderr
    room, run = estimates[-1], tmp_path / "run"
    folders = list((run / "checkpoints").glob("checkpoint-*"))
    assert len(folders) <= (room.at_once or 0)
    assert room.checkpoint >= max(map(size_of, folders))
    assert room.kept >= size_of(run / "adapter") + size_of(run / "model")
    assert room.export >= size_of(run / "export") > 0 if "exported" in name else not room.export
    assert room.largest >= max(file.stat().st_size for file in run.rglob("*") if file.is_file())
    # Nothing was deleted, so that this is also the most that lay there.
    assert size_of(run) <= room.needed <= 2 * size_of(run) + 16 * 2**20


@pytest.mark.parametrize(
    ("words", "steps", "an_epoch", "loop", "most"),
    [
        (["training.save_total_limit=2", "training.save_steps=10"], 100, None, False, 3),
        (["training.save_total_limit=2", "training.save_steps=10"], 100, None, True, 3),
        (["training.save_total_limit=2", "training.eval_steps=10"], 100, None, True, 4),
        (["training.save_total_limit=1", "training.eval_steps=10"], 100, None, False, 3),
        (["training.save_total_limit=null", "training.save_steps=10"], 100, None, False, 11),
        (["training.save_total_limit=null", "training.save_steps=10"], None, None, False, None),
        (["training.save_total_limit=null", "training.epochs=3"], None, None, False, 4),
        (["training.save_total_limit=null", "training.max_steps=50"], 50, 10, False, 6),
        (["training.save_total_limit=5", "training.save_steps=100"], 100, None, False, 2),
    ],
)
def test_how_many_checkpoints_lie_there_at_once(
    words: list[str], steps: int | None, an_epoch: int | None, loop: bool, most: int | None
) -> None:
    assert checkpoints_at_once(load_config(None, words), steps, an_epoch, loop=loop) == most


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_sharded_checkpoint_holds_what_is_trained_twice_and_nothing_frozen(
    method: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = load_config(
        None, [f"model={tiny_model}", "device=cpu", f"method={method}", f"output_dir={tmp_path}"]
    )
    planned = plan_run(config)
    one = disk_needs.planned_room(config, planned)
    plan = dataclasses.replace(planned.plan, strategy="sharded")
    sharded = disk_needs.planned_room(config, dataclasses.replace(planned, plan=plan))
    # On the CPU all weights are fp32.
    assert sharded.checkpoint - one.checkpoint == 4 * (
        planned.profile.trainable if method == "lora" else planned.profile.parameters
    )
    assert (sharded.kept, sharded.largest) == (one.kept, one.largest)


def small_disk(monkeypatch: pytest.MonkeyPatch, **told: Any) -> None:
    """The system tells of a disk like this one."""
    there = FileSystem(Path("/mnt/small"), total=2**22, free=2**21, files_free=None, read_only=False)
    monkeypatch.setattr(disk_needs, "file_system_of", lambda path: dataclasses.replace(there, **told))


def test_a_disk_too_small_is_refused_with_the_figures(
    tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_disk(monkeypatch)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {tiny_model}\ndata: {tiny_rows}\ndevice: cpu\noutput_dir: {tmp_path / 'run'}\n"
    )
    done = trimtab("plan", str(config))
    assert done.returncode == 2
    (line,) = re.findall(r"✗ disk .*", done.stdout)
    assert "2.0 MiB are free on /mnt/small" in line
    told = json.loads(trimtab("plan", str(config), "--json").stdout)["disk"]
    assert told["needed"] > told["free"] == 2**21
    assert not told["fits"]
    # So is a plan for GPUs that need not be here.
    planned = trimtab("plan", str(config), "device=auto", "--gpus", "T4")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert re.search(r"! disk .* on /mnt/small; too little here", planned.stdout)
    done = trimtab("train", str(config), "training.keep_best=false")
    assert done.returncode == 2
    assert "has too little room for the run" in done.stderr
    assert "change: set training.save_total_limit=1 (now 2)" in done.stderr
    assert not (tmp_path / "run").exists()
    # A rehearsal is of another machine, whose disk is not this one's.
    monkeypatch.setenv("TRIMTAB_REHEARSAL", "1")
    assert "has too little room" not in trimtab("train", str(config), "training.max_steps=1").stderr


def test_what_only_the_data_tells_is_checked_once_it_is_read(
    tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 36 rows, 10 epochs, a checkpoint at every other step: 180 of them, which a plan cannot know.
    words = ["training.epochs=10", "training.batch_size=1", "training.save_steps=2", "data.eval_fraction=0.1"]
    small_disk(monkeypatch, free=20 * 2**20, total=2**30)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {tiny_model}\ndata: {tiny_rows}\ndevice: cpu\noutput_dir: {tmp_path / 'run'}\n"
    )
    words.append("training.save_total_limit=null")
    assert "✓ disk       up to" in trimtab("plan", str(config), *words).stdout
    done = trimtab("train", str(config), *words)
    assert done.returncode == 2
    assert re.search(r"up to \d+ MiB are written \(181 checkpoints of", done.stderr), done.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()  # the run has not begun


def room(**more: Any) -> Room:
    told: dict[str, Any] = {"total": 2**40, "free": 2**30, "files_free": None, "read_only": False}
    own = {name: more.pop(name) for name in [*more] if name in told}
    system = FileSystem(Path("/mnt"), **(told | own))
    plain: dict[str, Any] = {"at_once": 3, "kept": 0, "export": 0, "beside": 0, "there": 0, "largest": 100}
    return Room(folder=Path("/mnt/run"), system=system, checkpoint=2**20, **(plain | more))


def test_what_else_the_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [])
    room().check(config)
    unknown = room(total=0, free=0)
    unknown.check(config)
    assert unknown.line() == ("✓", "disk", f"{unknown.needs()}, what is free is not told on /mnt")
    with pytest.raises(RequestError, match="read-only"):
        room(read_only=True).check(config)
    with pytest.raises(RequestError, match="can hold 7 more files"):
        room(files_free=7).check(config)
    monkeypatch.setattr(room_on_disk, "largest_file", lambda: 64)
    with pytest.raises(RequestError, match="ulimit -f"):
        room().check(config)


def test_what_is_there_already_is_not_counted_twice_and_close_is_said() -> None:
    assert room().needed == 3 * 2**20
    assert room(there=2**20).needed == 2 * 2**20
    assert room(kept=5 * 2**20).needed == 7 * 2**20
    assert room(free=int(3.5 * 2**20)).line()[0] == "!"
    assert room(free=int(3.5 * 2**20)).refusal() is None


def test_sizes_and_places(tmp_path: Path) -> None:
    assert [amount(n) for n in (0, 999, 1000, 1536, 10 * 2**20, 2**40)] == [
        *("0 bytes", "999 bytes", "1.0 KiB", "1.5 KiB", "10 MiB", "1.0 TiB"),
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert size_of(tmp_path / "a") == size_of(tmp_path / "a" / "b") == 5
    assert size_of(tmp_path / "gone") == 0
    assert nearest(tmp_path / "gone" / "deeper") == tmp_path
    assert file_system_of(tmp_path / "gone").total >= file_system_of(tmp_path).free > 0
