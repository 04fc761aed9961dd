"""What the console prints of a rehearsal, read as a first-time user would."""

from __future__ import annotations

import copy

from trimtab.diagnose.finding import Place
from trimtab.rehearse.report import render
from trimtab.rehearse.session import AskedAt
from trimtab.rehearse.verdict import Result


def _asked(how: str, line: int, library: int | None = None) -> AskedAt:
    inside = Place("/lib/site-packages/trl/trainer.py", library, "x.item()") if library else None
    return AskedAt(how, "Tensor.item", Place("train.py", line, "trainer.train()"), inside)


def test_values_that_were_only_read_are_told_once_for_each_line_of_the_program() -> None:
    asked = [_asked("value", 7, inside) for inside in (90, 40, 90)] + [_asked("value", 9)]
    text = render(Result("clean", [], {}, 2, 1.0, asked=asked, shapes_only=True, target="train.py"))
    assert "not proven" not in text
    assert text.count("read        train.py:7") == 1
    assert "inside trl/trainer.py:40, 90" in text
    assert "read        train.py:9" in text


def test_values_that_decide_are_told_line_by_line_and_apart() -> None:
    asked = [_asked("value", 7, 40), _asked("decision", 8, 41), _asked("shape", 8, 42)]
    text = render(Result("unproven", [], {}, 2, 1.0, asked=asked, shapes_only=True, target="train.py"))
    proven, known = text.index("not proven: "), text.index("not known: ")
    assert proven < text.index("decided by  train.py:8") < text.index("sized by    train.py:8") < known
    assert known < text.index("read        train.py:7")


def test_lines_of_python_itself_are_told_by_their_module() -> None:
    asked = [AskedAt("value", "Tensor.item", None, Place(copy.__file__, 150, "y = copier(memo)"))]
    text = render(Result("clean", [], {}, 2, 1.0, asked=asked, target="train.py"))
    assert "read        copy.py:150   y = copier(memo)" in text


def test_notes_keep_to_the_width() -> None:
    text = render(Result("clean", [], {}, 2, 1.0, notes=["a word and another one, " * 12], target="train.py"))
    assert max(map(len, text.splitlines())) <= 110
    assert text.splitlines()[0].startswith("   note    a word")
