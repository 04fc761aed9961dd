"""The line that tells what is waited for."""

import io
import sys

import pytest

from trimtab.cli.meanwhile import meanwhile


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_what_is_done_and_the_line_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with meanwhile("looking", quiet=False) as tell:
        tell("executing [bold]steps[/bold]")
    shown = screen.getvalue()
    assert "executing [bold]steps[/bold]" in shown
    assert shown.rstrip("\n").endswith("\x1b[2K")


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (_Screen(), True)])
def test_nothing_is_told_without_a_terminal_or_beside_json(
    stream: io.StringIO, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with meanwhile("looking", quiet=quiet) as tell:
        tell("executing")
    assert stream.getvalue() == ""
