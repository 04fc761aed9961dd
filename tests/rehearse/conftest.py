"""Runs the command line on a program and reads its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

PROGRAMS = Path(__file__).parent / "programs"

_DRIVER = """
import sys
import textwrap
from pathlib import Path
import json
from trimtab.rehearse.report import render
from trimtab.rehearse.run import rehearse
from trimtab.rehearse.session import Settings
options = json.loads(sys.argv[1])
ranks, timeout, out = options.pop("ranks"), options.pop("timeout"), options.pop("out")
result = rehearse(sys.argv[2:], Settings(**options), ranks=ranks, timeout=timeout)
said = {"text": render(result), "exit": result.exit_code, "torch": "torch" in sys.modules}
Path(out).write_text(json.dumps({**result.to_dict(), **said}))
"""


Rehearse = Callable[..., dict[str, Any]]


@contextmanager
def _started(*modules: str) -> Iterator[subprocess.Popen[str]]:
    text = (Path(__file__).parent / "warm.py").read_text()
    command = [sys.executable, "-c", text, *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def _warm_process() -> Iterator[subprocess.Popen[str]]:
    with _started() as process:
        yield process


@pytest.fixture(scope="session")
def _with_transformers() -> Iterator[subprocess.Popen[str]]:
    with _started(
        "transformers.trainer", "transformers.models.higgs_audio_v2.modeling_higgs_audio_v2", "peft"
    ) as process:
        yield process


@pytest.fixture
def ask(tmp_path: Path, _warm_process: subprocess.Popen[str]) -> Rehearse:
    """Ask the warm process, and answer with the report and what was printed."""
    return _asked(_warm_process, tmp_path)


def _asked(process: subprocess.Popen[str], tmp_path: Path) -> Rehearse:
    def run(*words: str, **request: Any) -> dict[str, Any]:
        out = tmp_path / "report.json"
        out.unlink(missing_ok=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**request, "words": words, "out": str(out)}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n", (tmp_path / "stderr").read_text()
        said = {name: (tmp_path / name).read_text() for name in ("stdout", "stderr")}
        return {**json.loads(out.read_text()), **said}

    return run


@pytest.fixture
def rehearse_warm(ask: Rehearse) -> Rehearse:
    """Rehearse in forks of a process that has imported torch (see warm.py), and answer with the report."""

    def run(*words: str, ranks: int | None = None, **settings: Any) -> dict[str, Any]:
        return ask(*words, ranks=ranks, timeout=120, settings={"gpus": 2, **settings})

    return run


@pytest.fixture
def rehearse_warmer(tmp_path: Path, _with_transformers: subprocess.Popen[str]) -> Rehearse:
    """The same in forks of a process that has imported transformers and PEFT too."""

    def run(*words: str, ranks: int | None = None, **settings: Any) -> dict[str, Any]:
        asked = _asked(_with_transformers, tmp_path)
        return asked(*words, ranks=ranks, timeout=120, settings={"gpus": 2, **settings})

    return run


@pytest.fixture
def checked(ask: Rehearse, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a few lines under a single check, on virtual GPUs, and answer with its findings.

    The lines that fail are marked `# where`, those to change `# cause`; `marks` in the answer holds their numbers.
    """

    def run(check: type, code: str, **settings: Any) -> dict[str, Any]:
        path = tmp_path / "program.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
        marks = {word: marked_lines(path, word) for word in ("where", "cause")}
        name = f"{check.__module__}:{check.__name__}"
        return {**ask(str(path), check=name, settings=settings), "marks": marks}

    return run


@pytest.fixture
def rehearse(tmp_path: Path) -> Rehearse:
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
