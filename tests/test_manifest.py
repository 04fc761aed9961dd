"""A folder that says what was written into it: every way in which it may be another by now is told by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.manifest import MANIFEST, Damaged, only_listed, part_of, remove_listed, seal, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "shards").mkdir(parents=True)
    (made / "weights.safetensors").write_bytes(bytes(3_000_000))
    (made / "state.json").write_text("{}")
    (made / "shards" / "0.distcp").write_bytes(b"zero")
    (tmp_path / "grows.bin").write_bytes(b"first")
    seal(made, {"step": 4}, {"grows.bin": part_of(tmp_path / "grows.bin")})
    return made


def flip(path: Path, at: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def listed(folder: Path, name: str) -> None:
    """The manifest names one more file."""
    found = json.loads((folder / MANIFEST).read_text())
    found["files"][name] = {"size": 1, "sha256": "0"}
    (folder / MANIFEST).write_text(json.dumps(found))


def test_what_was_written_is_whole_also_when_a_file_beside_it_grows(folder: Path) -> None:
    with (folder.parent / "grows.bin").open("ab") as file:
        file.write(b" and more")
    assert verify(folder, beside=folder.parent).about["step"] == 4


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (
            lambda f: flip(f / "weights.safetensors", 2_999_999),
            "weights.safetensors: its content has changed",
        ),
        (
            lambda f: (f / "state.json").write_text(""),
            "state.json has 0 bytes, and had 2 when it was written",
        ),
        (lambda f: flip(f / "shards" / "0.distcp"), "shards/0.distcp: its content has changed"),
        (
            lambda f: (f / "pytorch_model.bin").write_text("!"),
            "pytorch_model.bin was not there when it was written",
        ),
        (lambda f: (f / "more").symlink_to("/etc/passwd"), "more is no plain file"),
        (
            lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:200]),
            f"{MANIFEST} cannot be read",
        ),
        (lambda f: (f / MANIFEST).write_text("[" * 100_000), f"{MANIFEST} cannot be read"),
        (lambda f: (f / MANIFEST).write_text("[]"), f"{MANIFEST} cannot be read"),
        (lambda f: (f / MANIFEST).write_text('{"format": 2}'), f"{MANIFEST} has format 2"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda f: listed(f, "../grows.bin"), "which lies outside of the folder"),
        (lambda f: listed(f, "/etc/passwd"), "which lies outside of the folder"),
        (lambda f: listed(f, "shards/../../grows.bin"), "which lies outside of the folder"),
        (lambda f: listed(f, "gone"), "gone is missing"),
        (lambda f: flip(f.parent / "grows.bin"), "grows.bin, which it relies on: its content has changed"),
        (
            lambda f: (f.parent / "grows.bin").write_bytes(b"fir"),
            "grows.bin, which it relies on, ends before it",
        ),
        (lambda f: (f.parent / "grows.bin").unlink(), "grows.bin is missing, which it relies on"),
    ],
)
def test_each_damage_is_named(folder: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(folder)
    with pytest.raises(Damaged) as raised:
        verify(folder, beside=folder.parent)
    assert reason in str(raised.value)


def test_a_note_of_the_users_own_is_no_damage_and_is_not_deleted(folder: Path) -> None:
    (folder / "notes.txt").write_text("the good one")
    verify(folder)
    assert not only_listed(folder)
    assert not remove_listed(folder)
    assert (folder / "weights.safetensors").exists()


def test_a_removal_that_was_cut_short_is_taken_up_again(folder: Path) -> None:
    (folder / "state.json").unlink()
    assert remove_listed(folder)
    assert not folder.exists()
