"""The README's commands run as shown; its numbers are checked where a test can know them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def commands(language: str) -> list[str]:
    """The lines of the README's code blocks in one language, comments left out."""
    blocks = re.findall(
        rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    assert words[0] == "trimtab", command
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        check=False,
        env=os.environ,
    )


def quick(command: str) -> bool:
    return command.split()[1] in ("plan", "doctor", "config-schema")


def test_quick_commands_of_the_readme_run(trimtab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    shown = [c for c in commands("sh") if c.startswith("trimtab") and quick(c)]
    assert shown
    for command in shown:
        done = trimtab(*shlex.split(command)[1:], cwd=ROOT)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_readme_runs_in_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "my_rows.jsonl").write_text(
        "\n".join(f'{{"instruction": "Say {n}", "output": "Here it is: {n}."}}' for n in range(40))
    )
    for command in [c for c in commands("sh") if c.startswith("trimtab")]:
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    # One new interpreter for all; no block sees another's names.
    each = "import sys\nfor block in sys.argv[1:]:\n    exec(compile(block, 'README.md', 'exec'), {})"
    done = subprocess.run(
        [sys.executable, "-c", each, *blocks],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
