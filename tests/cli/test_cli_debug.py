"""An error that nobody foresaw: a few lines by default, the traceback on request, no secret in either."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.cli import faults

Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` meets an error of ours."""
    import trimtab.hardware.doctor as room

    def examine(*_: object) -> None:
        raise ZeroDivisionError("by zero, with hf_" + "aB3dE" * 7)

    monkeypatch.setattr(room, "examine", examine)
    monkeypatch.setenv(faults.DEBUG, "0")


@pytest.mark.usefixtures("broken")
def test_no_traceback_by_default(trimtab: Verb) -> None:
    done = trimtab("doctor")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ZeroDivisionError: by zero, with (not shown)\n")
    assert "where: cli/doctor.py:" in done.stderr
    assert "--debug" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("words", [("--debug", "doctor"), ("doctor", "--debug")])
def test_the_traceback_on_request(trimtab: Verb, words: tuple[str, ...]) -> None:
    done = trimtab(*words)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ZeroDivisionError: by zero, with (not shown)\n")


def test_a_foreseen_error_shows_its_cause_on_request(trimtab: Verb, tmp_path: Path) -> None:
    done = trimtab("plan", str(tmp_path / "no.yaml"), TRIMTAB_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "was not found" in done.stderr


def test_the_flag_of_a_script_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.DEBUG, "0")
    words = ["rehearse", "a.py", "--debug"]
    assert faults.take_debug_flag(words) == words
    assert not faults.debugging()
    assert faults.take_debug_flag(["--debug", *words]) == words
    assert faults.debugging()


def test_the_users_own_lines_are_shown(tmp_path: Path) -> None:
    script = tmp_path / "rewards.py"
    script.write_text("def judge():\n    return {}['no']\n")
    space: dict[str, Callable[[], object]] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    with pytest.raises(KeyError) as raised:
        space["judge"]()
    text = faults.told(raised.value)
    assert f'File "{script}", line 2, in judge' in text
    assert "return {}['no']" in text
