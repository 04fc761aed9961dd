"""Packages that were installed into a folder of PYTHONPATH are no user code; what lies beside them is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trimtab.diagnose import source
from trimtab.virtual import packages


def test_packages_of_a_target_folder_are_told_from_the_program_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lib/deep.py", "single.py", "train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    info = tmp_path / "lib-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(
        "lib/deep.py,sha256=x,0\nsingle.py,,\n../../bin/lib,,\nlib-1.0.dist-info/RECORD,,\n"
    )
    assert packages.installed_in(tmp_path) == {
        str(tmp_path / "lib") + os.sep,
        str(tmp_path / "single.py"),
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not source.is_user_file(str(tmp_path / "lib" / "deep.py"))
    assert not source.is_user_file(str(tmp_path / "single.py"))
    assert source.is_user_file(str(tmp_path / "train.py"))
