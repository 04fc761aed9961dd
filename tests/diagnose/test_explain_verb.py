"""The verb `trimtab explain`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from trimtab.cli.explain import explain
from trimtab.errors import RequestError

app = typer.Typer()
app.command()(explain)

LOG = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    scaler.step(opt)
AssertionError: No inf checks were recorded for this optimizer.
"""


def test_a_known_log_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text(LOG)
    result = CliRunner().invoke(app, [str(file)])
    assert result.exit_code == 0
    for part in ("scaler-misuse", "/home/me/train.py:9  scaler.step(opt)", "cause ", "fix "):
        assert part in result.output


def test_standard_input_and_json() -> None:
    result = CliRunner().invoke(app, ["--json", "-"], input=LOG)
    (explanation,) = json.loads(result.output)
    assert result.exit_code == 0
    assert explanation["kind"] == "scaler-misuse"
    assert explanation["where"]["line"] == 9


def test_an_unknown_log_ends_with_three() -> None:
    result = CliRunner().invoke(app, [], input=LOG.replace("No inf checks", "No ducks"))
    assert result.exit_code == 3
    assert "I don't know this one." in result.output
    assert "/home/me/train.py:9" in result.output
    assert CliRunner().invoke(app, ["--json"], input="nothing").output.strip() == "[]"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "none.txt")])
    assert isinstance(result.exception, RequestError)
