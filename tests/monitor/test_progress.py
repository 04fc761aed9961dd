"""What is shown: few plain lines in a log, a bar on a terminal, warnings always."""

from __future__ import annotations

import io
import os
import pty

import pytest
from rich.console import Console

from trimtab.monitor.progress import Bar, Figures, Mode, Plain, Quiet, make_progress


def log() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=40), text


def run(progress: Quiet, total: int) -> None:
    progress.begin(Figures(step=0, total=total, elapsed=0.0))
    for step in range(1, total + 1):
        figures = Figures(
            step=step, total=total, elapsed=step * 2.0, left=(total - step) * 2.0, loss=1 / step
        )
        progress.update(figures)
        progress.settle(figures)
    progress.end()


def test_a_line_has_every_figure_that_is_known() -> None:
    figures = Figures(
        step=20,
        total=100,
        elapsed=62,
        left=250,
        loss=1.23456,
        learning_rate=2e-4,
        grad_norm=0.9312,
        tokens_per_second=1240,
        steps_per_second=0.5,
        memory=int(3.4 * 2**30),
    )
    assert figures.line() == (
        "step 20/100  loss 1.235  lr 2.00e-04  grad norm 0.931  1,240 tokens/s  memory 3.4 GiB"
        "  elapsed 1:02  left 4:10"
    )
    bare = Figures(step=1, total=1, elapsed=3, left=0, steps_per_second=0.5)
    assert bare.line() == "step 1/1  0.5 steps/s  elapsed 0:03"


def test_a_long_run_gives_twenty_plain_lines_up_to_the_last_step_none_of_them_wrapped() -> None:
    console, text = log()
    run(Plain(console), 5000)
    lines = text.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[0].startswith("step 250/5000  loss 0.004")
    assert lines[-1].startswith("step 5000/5000")


def test_a_short_run_shows_each_step_once() -> None:
    console, text = log()
    progress = Plain(console)
    progress.begin(Figures(step=1, total=3, elapsed=0.0))
    for step in (2, 2, 3, 3):
        progress.settle(Figures(step=step, total=3, elapsed=0.0))
    assert [line.split()[1] for line in text.getvalue().splitlines()] == ["2/3", "3/3"]


def test_without_progress_warnings_are_still_said() -> None:
    console, text = log()
    progress = make_progress("none", console=console)
    run(progress, 10)
    progress.note("first step on cpu …")
    assert text.getvalue() == ""
    progress.say("stuck: [bold]nothing[/bold] finished")
    assert text.getvalue() == "stuck: [bold]nothing[/bold] finished\n"


@pytest.mark.parametrize(("mode", "kind"), [("auto", Plain), ("plain", Plain), ("bar", Bar), ("none", Quiet)])
def test_mode_without_a_terminal(mode: Mode, kind: type[Quiet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # must not put a bar into a log file
    assert type(make_progress(mode, console=log()[0])) is kind
    assert type(make_progress(mode, console=log()[0], main=False)) is Quiet


def test_auto_is_a_bar_on_a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pty.openpty()
    try:
        with os.fdopen(terminal, "w") as file:
            assert type(make_progress("auto", console=Console(file=file))) is Bar
            monkeypatch.setenv("TERM", "dumb")
            assert type(make_progress("auto", console=Console(file=file))) is Plain
    finally:
        os.close(master)


def test_the_bar_shows_steps_figures_and_evaluation_and_lets_lines_through() -> None:
    text = io.StringIO()
    progress = Bar(Console(file=text, force_terminal=True, width=80, color_system=None))
    progress.begin(Figures(step=0, total=40, elapsed=0.0))
    progress.update(Figures(step=12, total=40, elapsed=24.0, left=3700, loss=1.5, tokens_per_second=900))
    progress.evaluating(3, 8)
    progress.say("a line above the bar")
    progress.evaluated()
    progress.end()
    progress.end()
    shown = text.getvalue()
    assert "12/40" in shown
    assert "1:01:40 left" in shown
    assert "loss 1.5  900 tokens/s" in shown
    assert "evaluation" in shown
    assert "3/8" in shown
    assert "a line above the bar\n" in shown
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is given back"


def test_an_evaluation_outside_training_has_a_bar_of_its_own() -> None:
    text = io.StringIO()
    progress = Bar(Console(file=text, force_terminal=True, width=80, color_system=None))
    for batch in (1, 2):
        progress.evaluating(batch, 2)
    progress.evaluated()
    assert "evaluation" in text.getvalue()
    assert text.getvalue().rstrip().endswith("\x1b[?25h")
