"""Runs the command line on a program and reads its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"

_DRIVER = """
import sys
from pathlib import Path
import json
from trimtab.rehearse.report import render
from trimtab.rehearse.run import rehearse
from trimtab.rehearse.session import Settings
options = json.loads(sys.argv[1])
ranks, timeout, out = options.pop("ranks"), options.pop("timeout"), options.pop("out")
result = rehearse(sys.argv[2:], Settings(**options), ranks=ranks, timeout=timeout)
Path(out).write_text(json.dumps({**result.to_dict(), "text": render(result), "exit": result.exit_code}))
"""


@pytest.fixture
def rehearse(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Rehearse a target in a process of its own, as the command line does, and answer with the report."""

    def run(*words: str, ranks: int | None = None, timeout: float = 120, **settings: Any) -> dict[str, Any]:
        out = tmp_path / "report.json"
        options = {"gpus": 2, **settings, "ranks": ranks, "timeout": timeout, "out": str(out)}
        done = subprocess.run(
            [sys.executable, "-c", _DRIVER, json.dumps(options), *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=timeout + 60,
            check=False,
        )
        assert out.exists(), done.stdout + done.stderr
        return {**json.loads(out.read_text()), "stdout": done.stdout, "stderr": done.stderr}

    return run
