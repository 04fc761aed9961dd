"""The pytest plugin: virtual GPUs for anybody's tests."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MODULE = """
import pytest, torch

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_option():
    assert torch.ones(2, device=f"cuda:{torch.cuda.device_count() - 1}").sum().item() == 2

@pytest.mark.virtual_gpus(3, memory="1MiB")
def test_mark():
    assert torch.cuda.device_count() == 3
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 20, device="cuda")

def test_after_the_mark(request):
    assert torch.cuda.device_count() == request.config.getoption("--virtual-gpus")
"""


@pytest.fixture
def module(pytester: pytest.Pytester) -> Path:
    return pytester.makepyfile(MODULE)


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    # A process of its own; the plugin is named where the package is not installed with its entry point.
    installed = bool(entry_points(group="pytest11", name="trimtab"))
    plugin = () if installed else ("-p", "trimtab.virtual.pytest_plugin")
    # Others that are installed beside it take seconds to import.
    others = (
        word
        for name in ("cacheprovider", "hypothesispytest", "anyio", "xdist")
        for word in ("-p", f"no:{name}")
    )
    return pytester.runpytest_subprocess(*plugin, *others, *arguments)


def test_with_the_option_which_a_conftest_sees_too(pytester: pytest.Pytester, module: Path) -> None:
    pytester.makeconftest("import torch\nCOUNT = torch.cuda.device_count()\n")
    pytester.makepyfile(
        test_conftest="from conftest import COUNT\ndef test_count():\n    assert COUNT == 2\n"
    )
    run(pytester, "--virtual-gpus", "2", "--strict-markers").assert_outcomes(passed=4)


def test_without_the_option_only_the_mark_works(pytester: pytest.Pytester, module: Path) -> None:
    import torch

    if torch.cuda.device_count():
        pytest.skip("a real GPU is there")
    run(pytester, "--strict-markers").assert_outcomes(passed=2, skipped=1)


def test_nothing_is_imported_when_it_is_not_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_light():\n    assert 'torch' not in sys.modules\n")
    run(pytester).assert_outcomes(passed=1)


def test_a_senseless_number(pytester: pytest.Pytester, module: Path) -> None:
    assert run(pytester, "--virtual-gpus", "-1").ret == pytest.ExitCode.USAGE_ERROR
