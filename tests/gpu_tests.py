"""How tests on a GPU run: each finds nothing of those before it there, and one that fails is told at once."""

from __future__ import annotations

import gc
from typing import Any

import pytest


def forget_memory() -> None:
    """Free what nobody holds any more on the GPUs, also in cycles (a trainer is one), and count peaks from here.

    Python's collector would free it when it likes: in the middle of what a test measures.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def prepare(item: pytest.Item) -> None:
    """Before a test that is marked `gpu`: skip what only hardware has, and forget what others left."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    needs = mark.kwargs.get("needs")
    if needs and item.config.getoption("virtual_gpus"):
        pytest.skip(f"virtual GPUs have none: {needs}")
    forget_memory()


class TellFailures:
    """A failed test's name and its error as soon as it fails: pytest tells them at the end, which a run that is cut off
    never comes to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        lines = report.longreprtext.strip().splitlines() or ["no reason told"]
        error = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"FAILED at {report.when}: {report.nodeid}: {error}", red=True, flush=True)
