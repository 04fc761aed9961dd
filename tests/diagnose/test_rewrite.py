"""Edits of a program's text: what surrounds them stays as it was written."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from trimtab.diagnose import rewrite, source

TEXT = """x = make()  # größe
for batch in loader:
    y = model(batch["ü"], x)  # kept
    step(y)"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_an_expression_gives_way_and_the_line_around_it_stays(file: str) -> None:
    call = next(iter(source.call_on(file, 3)))
    edit = rewrite.in_place_of(file, call.args[1], "x.to(device)")
    assert rewrite.applied(TEXT, [edit]).splitlines()[2] == '    y = model(batch["ü"], x.to(device))  # kept'


def test_lines_before_and_after_are_indented_alike_and_several_edits_do_not_disturb_each_other(
    file: str,
) -> None:
    node, last = source.statement(file, 3), source.statement(file, 4)
    assert node is not None
    assert last is not None
    edits = [
        rewrite.before(file, node, "x = x.to(device)"),
        rewrite.after(file, last, "done()"),
        rewrite.in_place_of(file, last, "step(y.float())"),
    ]
    changed = rewrite.applied(TEXT, edits)
    ast.parse(changed)
    assert changed.splitlines()[2:] == [
        "    x = x.to(device)",
        '    y = model(batch["ü"], x)  # kept',
        "    step(y.float())",
        "    done()",
    ]
