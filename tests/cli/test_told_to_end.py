"""Signals outside of a training: a verb ends with a line and exit code 1, whichever signal it is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.cli.told_to_end import heard

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_verb_that_is_told_to_end_says_so(
    trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    asked = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for each in asked:  # a suite in the background ignores some of them
        signal.signal(each, signal.SIG_DFL if each != signal.SIGINT else signal.default_int_handler)
    before = [signal.getsignal(n) for n in asked]
    monkeypatch.setattr(
        "trimtab.hardware.doctor.examine", lambda *words, **named: os.kill(os.getpid(), number)
    )
    try:
        done = trimtab("doctor")
        assert (done.returncode, done.stderr) == (1, f"stopped by {number.name}, before it was done\n")
        assert [signal.getsignal(n) for n in asked] == before
    finally:
        for each, handler in asked.items():
            signal.signal(each, handler)


def test_a_run_that_is_told_to_end_before_it_begins_leaves_no_folder(
    trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "trimtab.recipes.planning.plan_run", lambda config, **more: os.kill(os.getpid(), signal.SIGTERM)
    )
    done = trimtab("train", f"output_dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (1, "stopped by SIGTERM, before it was done\n")
    assert not list(tmp_path.iterdir())


def test_what_is_ignored_stays_ignored_and_a_forked_child_ends_as_before() -> None:
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heard() as names:
            os.kill(os.getpid(), signal.SIGHUP)
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert names == []
    finally:
        signal.signal(signal.SIGHUP, kept)
