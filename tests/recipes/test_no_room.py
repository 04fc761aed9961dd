"""Runs that the system refuses a write or memory: one clear error, the last checkpoint whole, and how it goes on.

The disks are real: a small tmpfs, or the process's own limit on the size of a file. Where the test may not mount one
it is skipped.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.file_system import size_of
from trimtab.recipes.room_on_disk import Room
from trimtab.shortage import memory_fault, write_fault

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
RECIPES = {
    "sft": ["training.batch_size=8", "training.eval_steps=1", "training.keep_best=false"],
    "sft whole": ["method=full", "training.batch_size=8", "data.eval_fraction=0"],
    "grpo": [
        *("recipe=grpo", "data.source=sums", "data.max_rows=8", "data.max_length=64", "reward=length"),
        *("grpo.num_generations=4", "grpo.max_completion_length=4", "training.batch_size=4"),
    ],
    "zeroth": [
        *(
            "recipe=zeroth_order",
            "zeroth.task=sst2",
            "zeroth.method=mezo",
            "data=sample",
            "data.max_length=64",
        ),
        *("data.max_rows=20", "training.batch_size=8"),
    ],
    "vision": [
        *(
            "recipe=vision",
            "model=tiny-vision",
            "data=drawn-pictures",
            "data.max_rows=24",
            "data.max_length=64",
        ),
        *("training.batch_size=4", "samples.held_out=2", "samples.max_new_tokens=4"),
    ],
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A real file system of the given size; called again, it is emptied and has the new one."""
    place = tmp_path / "disk"
    place.mkdir()

    def sized(options: str) -> Path:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.name != "posix" or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("no file system may be mounted here")
        return place

    yield sized
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


@pytest.fixture
def train(
    tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {tiny_model}\ndata: {tiny_rows}\ndevice: cpu\nmonitor: {{progress: none}}\n")
    # These runs are to begin, although it is known that they cannot end.
    monkeypatch.setattr(Room, "refusal", lambda self: None)

    def run(folder: Path, recipe: str, *words: str) -> subprocess.CompletedProcess[str]:
        always = ["training.max_steps=2", "training.save_steps=1"]
        return trimtab("train", str(config), f"output_dir={folder}", *always, *RECIPES[recipe], *words)

    return run


def told(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The error, in its three parts and without a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    _, _, error = f"\n{done.stderr}".partition("\nerror: ")
    assert "\n  why: " in error
    assert "\n  change: " in error
    assert "Traceback" not in done.stderr
    assert "basic_ios" not in error.split("\n")[0]
    return error


def test_a_disk_that_fills_amid_a_checkpoint(disk: Any, train: Any) -> None:
    place = disk("size=720k")  # the second checkpoint does not fit
    error = told(train(place / "run", "sft"))
    assert error.startswith(f"no space left on {place}: ")
    assert " are free on " in error
    assert "checkpoint-1 is whole and kept in" in error
    assert "up to " in error  # what the run needs
    assert "training.save_total_limit=1" in error
    assert f"trimtab train {place / 'run' / 'config.yaml'} training.resume=true" in error
    remount(place, "size=20m")
    assert train(place / "run", "sft", "training.resume=true").returncode == 0
    assert (place / "run" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "recipe",
    ["zeroth", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "zeroth")],
)
def test_every_write_of_a_run_is_once_the_one_that_fails(
    recipe: str, disk: Any, train: Any, tmp_path: Path
) -> None:
    assert train(tmp_path / "whole", recipe, "training.save_total_limit=null").returncode == 0
    # By blocks: each file of the run ends on a disk of one of these sizes.
    full = size_of(tmp_path / "whole") // 1024 + 4 * sum(1 for _ in (tmp_path / "whole").rglob("*"))
    sizes = sorted({4, 8, 12, 16, 20, 24, *range(28, full, max(4, full // 9))})
    ends = []
    for size in sizes:
        place = disk(f"size={size}k")
        done = train(place / "run", recipe, "training.save_total_limit=null")
        ends.append(done.returncode)
        if done.returncode:
            assert "no space left on" in told(done)
    assert ends.count(1) > 8


def test_no_more_files(disk: Any, train: Any) -> None:
    error = told(train(disk("size=20m,nr_inodes=20") / "run", "sft"))
    assert "no space left for one more file" in error
    assert "inodes" in error


def test_a_disk_that_becomes_read_only(disk: Any, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.monitor.callback import MonitorCallback

    place = disk("size=20m")
    saved = str(place / "run" / "checkpoints")
    real = MonitorCallback.on_step_end

    def fail_after_one(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        real(self, args, state, control, **more)
        if state.global_step == 2:
            # The metrics are open for writing, which forbids it for all of the disk; a part of it is enough.
            subprocess.run(["mount", "--bind", saved, saved], check=True)
            remount(Path(saved), "bind,ro")

    with monkeypatch.context() as patch:
        patch.setattr(MonitorCallback, "on_step_end", fail_after_one)
        error = told(train(place / "run", "sft"))
    subprocess.run(["umount", saved], check=True)
    assert error.startswith(f"{saved} is read-only: ")
    assert "checkpoint-1 is whole" in error
    assert train(place / "run", "sft", "training.resume=true").returncode == 0


def test_a_file_larger_than_this_process_may_write(train: Any, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        error = told(train(tmp_path / "run", "sft"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "larger than this process or this file system allows: checkpoint-1/optimizer.pt" in error
    assert "`ulimit -f`, now 195 KiB" in error


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EIO, "the disk behind"),
        (errno.EACCES, "may not be used"),
    ],
)
def test_what_else_a_file_system_answers(
    number: int, words: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file layer that refuses as a network disk does: by its number alone, in the last file of a checkpoint."""
    from transformers import TrainerState

    def refused(self: Any, path: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TrainerState, "save_to_json", refused)
    error = told(train(tmp_path / "run", "sft"))
    assert words in error.split("\n")[0]
    assert "checkpoint-1" in error.split("\n")[0]  # where, although the error names no file
    assert "no checkpoint was saved before" in error


def test_a_worker_that_the_system_kills(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.data.collate import Collate

    ours, real = os.getpid(), Collate.__call__

    def killed(self: Any, examples: Any) -> Any:
        if os.getpid() != ours:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, examples)

    monkeypatch.setattr(Collate, "__call__", killed)
    error = told(train(tmp_path / "run", "sft", "training.dataloader_workers=1", "data.eval_fraction=0"))
    assert error.startswith("a process of the data loader was killed")
    assert "lower training.dataloader_workers" in error


class Refusing:
    """A file of a disk without room."""

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None: ...


def raised_by(call: Callable[..., Any], *given: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*given)
    return caught.value


def test_the_words_of_libraries(tmp_path: Path) -> None:
    """Errors that the libraries of today raise, and the words that others drop the number for."""
    fault = write_fault(raised_by(torch.save, torch.zeros(4), Refusing()))
    assert fault is not None
    assert fault.kind == "full"
    for text, kind in (
        ("Error while serializing: IoError(Os { code: 28 }): No space left on device (os error 28)", "full"),
        ("basic_ios::clear: iostream error", "unknown"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0", "unknown"),
        ("PytorchStreamWriter failed writing file data/3: file write failed", "unknown"),
        ("Disk quota exceeded", "quota"),
    ):
        fault = write_fault(RuntimeError(text))
        assert fault is not None, text
        assert fault.kind == kind, text
    wrapped = ValueError("could not save")
    wrapped.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "x"))
    fault = write_fault(wrapped, [tmp_path])
    assert fault is not None
    assert (fault.kind, fault.path) == ("quota", tmp_path / "x")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the row says: no space left on device"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
        PermissionError(errno.EACCES, "Permission denied", "/data/rows.jsonl"),
        RuntimeError("Expected all tensors to be on the same device"),
        KeyError("quota"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    assert write_fault(error, [tmp_path]) is None
    assert memory_fault(error) is None


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "device"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "device"),
        (
            RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "device",
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), "device"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't"), "host"),
        (RuntimeError("std::bad_alloc"), "host"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "worker"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "worker"),
    ],
)
def test_where_memory_is_lacking(error: Exception, where: str) -> None:
    found = memory_fault(error)
    assert found is not None
    assert found.where == where
