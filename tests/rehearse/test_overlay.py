"""What a rehearsed script writes: nothing of the user's changes, and the report says what it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import RequestError
from trimtab.rehearse import files_aside, left_behind, namespaces
from trimtab.rehearse.overlay import NotPermittedHere, Overlay, lay
from trimtab.rehearse.session import VARIABLE, Settings
from trimtab.rehearse.written import Files, Written, sentence

Ask = Callable[..., dict[str, Any]]

WRITES = """
import os, shutil, tempfile, torch
rank = int(os.environ.get("RANK", 0))
if rank == 0:
    os.makedirs("out", exist_ok=True)
    torch.save({"w": torch.ones(2)}, "out/model.pt")
    with open("old.txt", "a") as file:
        file.write(" and new")
    os.remove("gone.txt")
    os.rename("run", "run.before")  # a folder of an earlier run
    handle, name = tempfile.mkstemp()
    os.close(handle)
    os.replace(name, "from-tmp.txt")
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
assert open("old.txt").read() == "old and new", "every rank sees what one wrote"
assert os.listdir("run.before") == ["checkpoint"] and not os.path.exists("run")
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The warm process works in the test's own folder."""
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "gone.txt").write_text("still here")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").write_text("of an earlier run")
    (tmp_path / "script.py").write_text(WRITES)
    return tmp_path


def texts(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.suffix not in {".json", ".pt"} and path.name not in {"stdout", "stderr"} and path.is_file()
    }


def changes(report: dict[str, Any], folder: Path) -> dict[str, str]:
    written = report["files"]["written"]
    inside = [one for one in written if Path(one["path"]).is_relative_to(folder)]
    return {str(Path(one["path"]).relative_to(folder)): one["how"] for one in inside}


SAID = {
    "out/model.pt": "new",
    "from-tmp.txt": "new",
    "old.txt": "changed",
    "gone.txt": "removed",
    "run/checkpoint": "removed",
    "run.before/checkpoint": "new",
}


@pytest.fixture
def permitted(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only where this machine lets a process lay folders over others."""
    try:
        lay([], tmp_path_factory.mktemp("session")).close()
    except NotPermittedHere as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("permitted")
def test_nothing_of_the_users_is_changed_and_the_ranks_share_what_they_write(ask: Ask, folder: Path) -> None:
    before = texts(folder)
    kept = folder.parent / (folder.name + "-kept")
    report = ask("script.py", ranks=2, timeout=120, settings={"gpus": 2}, keep=str(kept))
    assert report["files"]["overlay"], report["files"]["why"]
    assert report["verdict"] != "fault", report["text"] + report["stderr"]
    assert texts(folder) == before
    assert changes(report, folder) == SAID
    assert not any(one["real"] for one in report["files"]["written"])
    there = kept / str(folder).lstrip("/")
    assert (there / "old.txt").read_text() == "old and new"
    assert (there / "out" / "model.pt").is_file()
    assert not (there / "gone.txt").exists()
    assert f"kept in {kept}: from-tmp.txt" in " ".join(report["text"].split())


def test_written_in_place_every_path_is_listed(ask: Ask, folder: Path) -> None:
    report = ask("script.py", ranks=2, timeout=120, settings={"gpus": 2}, in_place=True)
    assert report["verdict"] != "fault", report["text"] + report["stderr"]
    assert (folder / "old.txt").read_text() == "old and new"
    assert not (folder / "run").exists()
    own = {path: how for path, how in changes(report, folder).items() if path not in {"stdout", "stderr"}}
    assert own == SAID
    assert all(one["real"] for one in report["files"]["written"])
    assert "written for real (--in-place)" in " ".join(report["text"].split())


@pytest.fixture(params=["on a disk", "in memory"])
def overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Overlay]:
    session, work = tmp_path / "session", tmp_path / "work"
    session.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    try:
        laid = lay([], session, places=[] if request.param == "in memory" else None)
    except NotPermittedHere as error:
        pytest.skip(str(error))
    yield laid
    laid.close()
    left = [layer for layer in laid.layers if not layer.in_memory and layer.scratch.exists()]
    assert left == [], "the scratch folders are deleted"


def run(overlay: Overlay, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, preexec_fn=overlay.enter)


def test_a_folder_that_is_deleted_and_made_anew(overlay: Overlay) -> None:
    Path("out/deep").mkdir(parents=True)
    Path("out/deep/old").write_text("old")
    Path("out/same").write_text("same")
    run(overlay, "import shutil, os; shutil.rmtree('out'); os.mkdir('out'); open('out/new', 'w').close()")
    found = {Path(one.path).name: one.how for one in overlay.changes()}
    assert found == {"old": "removed", "same": "removed", "new": "new"}
    assert Path("out/deep/old").read_text() == "old"


def test_what_is_only_opened_is_not_changed_and_the_session_is_shared(
    overlay: Overlay, tmp_path: Path
) -> None:
    Path("lock").write_text("")
    Path("read").write_text("text")
    shared = tmp_path / "session" / "record"
    run(
        overlay,
        f"open('lock', 'r+').close(); assert open('read').read() == 'text'; open({str(shared)!r}, 'w')",
    )
    assert overlay.changes() == []
    assert shared.exists(), "what goes to the session's folder is there for the parent"


BENEATH_A_MOUNT = """
import os, subprocess, sys
from pathlib import Path
from trimtab.rehearse import overlay
overlay.is_admin = lambda: False  # as a user who may only make a namespace of his own
laid = overlay.lay([], Path(sys.argv[1]))
writes = "for name in ('old.txt', '../data/new.txt', '../other/new.txt'): open(name, 'w').write('x')"
subprocess.run([sys.executable, "-c", writes], check=True, preexec_fn=laid.enter)
home = Path.cwd().parent
print(sorted(str(Path(one.path).relative_to(home)) for one in laid.changes() if str(home) in one.path))
print(sorted(path.name for path in home.rglob("new.txt")), Path("old.txt").read_text())
laid.close()
"""


@pytest.mark.usefixtures("permitted")
def test_a_folder_beneath_which_something_is_mounted_is_covered_in_parts(tmp_path: Path) -> None:
    """Its user is no administrator: the kernel refuses one overlay over all of it."""
    session, home = tmp_path / "session", tmp_path / "home"
    for folder in (session, home / "project", home / "other", home / "data"):
        folder.mkdir(parents=True)
    (home / "project" / "old.txt").write_text("old")

    def mount() -> None:
        namespaces.call("mount", b"tmpfs", os.fsencode(home / "data"), b"tmpfs", 0, None)

    try:
        handles, held, _ = namespaces.make(mount, users=True)
    except NotPermittedHere as error:
        pytest.skip(str(error))
    said = subprocess.run(
        [sys.executable, "-c", BENEATH_A_MOUNT, str(session)],
        cwd=home / "project",
        preexec_fn=lambda: namespaces.enter(handles),
        capture_output=True,
        text=True,
        check=False,
    )
    for handle in (*handles, held):
        os.close(handle)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == ["['data/new.txt', 'other/new.txt', 'project/old.txt']", "[] old"]


def test_what_a_killed_rehearsal_left_is_swept_once_none_of_its_processes_lives(tmp_path: Path) -> None:
    ours = left_behind.make(left_behind.FILES, tmp_path)
    unlocked = tmp_path / f"{left_behind.FILES}nobodys"
    unlocked.mkdir()
    killed = f"""
import os, pathlib
from trimtab.rehearse import left_behind
folder = left_behind.make(left_behind.FILES, pathlib.Path({str(tmp_path)!r})).path
(folder / "work" / "work").mkdir(parents=True)
(folder / "work" / "work").chmod(0)
print(folder, flush=True)
os.kill(os.getpid(), 9)
"""
    left = subprocess.run([sys.executable, "-c", killed], stdout=subprocess.PIPE, text=True).stdout.strip()
    assert Path(left).is_dir()
    rank = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, VARIABLE: left},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert rank.stdout is not None
    assert rank.stdout.readline()
    left_behind.sweep([tmp_path])
    assert Path(left).is_dir(), "a rank that outlived its parent still writes there"
    rank.communicate(b"\n")
    left_behind.sweep([tmp_path])
    assert not Path(left).exists()
    assert ours.path.is_dir()
    assert unlocked.is_dir()
    ours.delete()
    assert not ours.path.exists()


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with (
        pytest.raises(RequestError, match="not empty"),
        files_aside.files([], tmp_path, Settings(), keep=tmp_path, in_place=False),
    ):
        pass


def test_where_there_is_no_overlay_the_report_says_so_and_why() -> None:
    assert sentence(Files(overlay=True)) == sentence(Files()) == ""
    assert sentence(Files(why="not permitted")) == "written for real (not permitted): nothing"
    files = Files(why="not permitted", written=[Written("/data/model.pt", "changed", True)])
    assert sentence(files) == "written for real (not permitted): /data/model.pt (changed)"
    assert Files.from_dict(asdict(files)) == files
