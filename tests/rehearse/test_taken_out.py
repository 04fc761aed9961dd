"""A definition that is taken out of its package without importing it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trimtab.rehearse import taken_out


def test_torchruns_parser_is_torchs_own_and_torch_is_not_imported() -> None:
    program = """
        import sys
        from trimtab.rehearse.taken_out import definition
        mine = definition("torch.distributed.run", "get_args_parser")()
        assert "torch" not in sys.modules
        from torch.distributed.run import get_args_parser
        theirs = get_args_parser()
        line = ["--nnodes", "1:2", "--nproc_per_node=4", "--standalone", "-m", "train", "--lr", "1"]
        assert vars(mine.parse_args(line)) == vars(theirs.parse_args(line))
        assert mine.format_help() == theirs.format_help()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "takeable"
    folder.mkdir()
    (folder / "__init__.py").write_text("import json\nNOTED = json.dumps(1)\n")
    (folder / "parts.py").write_text("import enum\nclass Colour(enum.Enum):\n    RED = 'red'\n")
    (folder / "main.py").write_text(
        "from takeable.parts import Colour as Shade\n"
        "COUNT = 2\n"
        "def first() -> list[str]:\n    return [one.value for one in Shade]\n"
        "def second():\n    return first() * COUNT\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("takeable", "takeable.parts", "takeable.main"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_what_a_definition_needs_comes_along(package: Path) -> None:
    assert taken_out.definition("takeable.main", "first")() == ["red"]
    assert "takeable" not in sys.modules


def test_what_cannot_be_taken_out_is_imported(package: Path) -> None:
    assert taken_out.definition("takeable.main", "second")() == ["red", "red"]
    assert "takeable.main" in sys.modules
