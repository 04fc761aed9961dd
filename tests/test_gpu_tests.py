"""How tests on a GPU run (`gpu_tests.py`), shown on a virtual one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_tests import forget_memory

TESTS = """
import os, pytest, torch

@pytest.mark.gpu
def test_leaves_a_cycle():
    left = [torch.empty(2**20, device="cuda")]
    left.append(left)

@pytest.mark.gpu
def test_finds_nothing():
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0

@pytest.mark.gpu(needs="time")
def test_of_hardware():
    raise AssertionError("runs on what is no hardware")

@pytest.mark.gpu
def test_fails():
    raise ValueError("the reason")

def test_never_comes_to_the_end():
    os._exit(7)
"""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.virtual_gpus(1)
@pytest.mark.usefixtures("_no_collector")
def test_what_is_in_a_cycle_is_freed_and_the_peak_counts_from_there() -> None:
    left = [torch.empty(2**20, device="cuda:0")]
    left.append(left)  # type: ignore[arg-type]
    del left
    assert torch.cuda.memory_allocated() == 2**22
    forget_memory()
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
    assert torch.cuda.max_memory_allocated() == 0


def test_a_run_that_is_cut_off_has_named_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "test_cut_off.py"
    file.write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from conftest_of_trimtab import *")
    (tmp_path / "conftest_of_trimtab.py").symlink_to(Path(__file__).with_name("conftest.py"))
    words = [sys.executable, "-m", "pytest", "--virtual-gpus", "1", "-v", "--tell-failures", str(file)]
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")])
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "test_finds_nothing PASSED" in done.stdout
    assert "test_of_hardware SKIPPED" in done.stdout
    told = "FAILED at call: test_cut_off.py::test_fails: ValueError: the reason"
    assert [line for line in done.stdout.splitlines() if line.startswith("FAILED at")] == [told]
