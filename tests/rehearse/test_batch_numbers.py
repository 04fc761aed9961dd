"""The numbers by which a program says how many rows it takes at once."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trimtab.rehearse.batch_numbers import fewer_rows, program_files


def _halved(tmp_path: Path, source: str, *line: str) -> str | None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    found = fewer_rows([str(script), *line], program_files([str(script), *line]), 2)
    return None if found is None else found.texts.get(str(script.resolve()), "")


@pytest.mark.parametrize(
    ("source", "halved"),
    [
        ("batch_size = 16", "batch_size = 8"),
        ("BATCH = 16  # ½ of what was", "BATCH = 8  # ½ of what was"),
        ("B, T = 16, 2048", "B, T = 8, 2048"),
        ("run(per_device_train_batch_size=6)", "run(per_device_train_batch_size=3)"),
        ("settings = {'micro_batch_size': 16, 'lr': 3}", "settings = {'micro_batch_size': 8, 'lr': 3}"),
        ("def run(model, bsz=4): ...", "def run(model, bsz=2): ..."),
        ("def run(*, batch=4): ...", "def run(*, batch=2): ..."),
        ("class C:\n    batch_size: int = 32", "class C:\n    batch_size: int = 16"),
        (
            "p.add_argument('--batch-size', type=int, default=8)",
            "p.add_argument('--batch-size', type=int, default=4)",
        ),
        ("ids = torch.randint(0, 99, (16, 128))", "ids = torch.randint(0, 99, (8, 128))"),
        (
            "ROWS = 16\nids = torch.randint(0, 99, (ROWS, 128))",
            "ROWS = 8\nids = torch.randint(0, 99, (ROWS, 128))",
        ),
        (
            "p.add_argument('--rows', default=16)\nids = torch.randint(0, 99, size=(a.rows, 128))",
            "p.add_argument('--rows', default=8)\nids = torch.randint(0, 99, size=(a.rows, 128))",
        ),
        (
            "x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 9, (16,))",
            "x, y = torch.randn(8, 3, 64, 64), torch.randint(0, 9, (8,))",
        ),
    ],
)
def test_each_is_found_and_the_rest_stays(tmp_path: Path, source: str, halved: str) -> None:
    assert _halved(tmp_path, source) == halved


@pytest.mark.parametrize(
    "source",
    [
        "batch_size = 1",
        "batch_first = True",
        "num_batches = 16",
        "batch_size = len(rows)",
        "w = torch.randn(16, 16)",
        "batch_size = 16.0",
        "LENGTH = 16\nids = torch.randint(0, 99, (LENGTH,))",
        "n = 16\nids = torch.randint(0, 99, (n, 128))",
        "def broken(:",
    ],
)
def test_other_numbers_are_left(tmp_path: Path, source: str) -> None:
    assert _halved(tmp_path, source) is None


@pytest.mark.parametrize(
    "source", ["# é\nbatch_size = 16\n".encode("latin-1"), b"\x00batch_size = 16", b"\xef\xbb\xbf\xff"]
)
def test_what_is_not_in_utf_8_is_left(tmp_path: Path, source: bytes) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(source)
    assert fewer_rows([str(script)], program_files([str(script)]), 2) is None


def test_ends_of_lines_stay(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"import sys\r\nbatch_size = 16\r\n")
    found = fewer_rows([str(script)], program_files([str(script)]), 2)
    assert found is not None
    assert found.texts == {str(script.resolve()): "import sys\r\nbatch_size = 8\r\n"}


def test_what_the_line_says_is_changed_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\n")
    line = [
        "torchrun",
        "--nproc-per-node",
        "2",
        str(script),
        "--batch_size",
        "8",
        "--eval-batch-size=6",
        "--lr",
        "4",
    ]
    found = fewer_rows(line, program_files(line), 2)
    assert found is not None
    assert found.words == [*line[:4], "--batch_size", "4", "--eval-batch-size=3", "--lr", "4"]
    assert found.changes == ["--batch_size 4 for 8", "--eval-batch-size 3 for 6"]
    assert not found.texts


def test_modules_beside_the_script_belong_to_it(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("BATCH_SIZE = 64\n")
    (tmp_path / "other.py").write_text("BATCH_SIZE = 64\n")
    script = tmp_path / "train.py"
    script.write_text("import os\nfrom settings import BATCH_SIZE\n")
    found = fewer_rows([str(script)], program_files([str(script)]), 4)
    assert found is not None
    assert found.texts == {str((tmp_path / "settings.py").resolve()): "BATCH_SIZE = 16\n"}
    assert found.changes == ["BATCH_SIZE 16 for 64 (settings.py:1)"]
