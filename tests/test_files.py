"""A file is there whole or not at all, and JSON is JSON."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trimtab.files import plain_value, whole_file, write_json_whole, write_whole


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    write_whole(target, "première\n")
    assert target.read_bytes() == "première\n".encode()
    write_whole(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("old")

    def stop_half_way() -> None:
        with whole_file(target) as scratch:
            scratch.write_text("ne")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        stop_half_way()
    assert target.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_what_cannot_be_json_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    target.write_text("{}")
    with pytest.raises(UnicodeEncodeError):
        write_json_whole(target, {"half a pair": "\ud800"})
    assert target.read_text() == "{}"
    assert [f.name for f in tmp_path.iterdir()] == ["summary.json"]


def test_a_kill_while_writing_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    target.write_text("old")
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom trimtab.files import whole_file\n"
        "with whole_file(Path(sys.argv[1])) as scratch:\n"
        "    scratch.write_text('ne')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert target.read_text() == "old"


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "deep" / "down" / "notes.txt", "text")
    assert (tmp_path / "deep" / "down" / "notes.txt").read_text() == "text"


def test_a_place_that_is_a_folder_is_refused_without_litter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "notes.txt", "text")
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "notes.txt", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "notes.txt").stat().st_mode) == 0o640


def test_json_keeps_what_json_lacks_as_text(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    content = {
        "loss": float("nan"),
        3: [np.float32(0.5), float("-inf")],
        "where": Path("run"),
        "tuple": (1, 2),
    }
    write_json_whole(target, content)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    kept = json.loads(target.read_text(encoding="utf-8"), parse_constant=refuse)
    assert kept == {"loss": "nan", "3": [0.5, "-inf"], "where": "run", "tuple": [1, 2]}
    assert target.read_text(encoding="utf-8").endswith("}\n")


def test_plain_values_pass_as_they_are() -> None:
    assert plain_value({"a": [1, 2.5, None, True, "text"]}) == {"a": [1, 2.5, None, True, "text"]}
