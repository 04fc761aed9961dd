"""Fixes that are tried: what a rehearsal with the change shows is what is said, and no file is touched."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.diagnose.finding import Cause, Edit, Finding, Place
from trimtab.rehearse.fixes import Texts, patch, try_fixes
from trimtab.rehearse.folding import fold
from trimtab.rehearse.report import TRIED
from trimtab.rehearse.verdict import Result

Rehearse = Callable[..., dict[str, Any]]

SPAWNING = """
import torch.multiprocessing as mp
from helper import word

def rank(number):
    print(word(), "OLD", flush=True)

if __name__ == "__main__":
    rank(0)
    mp.spawn(rank, nprocs=1)
"""


def test_the_script_its_modules_and_spawned_children_read_the_other_text(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    script, helper = tmp_path / "script.py", tmp_path / "helper.py"
    script.write_text(SPAWNING)
    helper.write_text("def word():\n    return 'old'\n")
    instead = {
        str(script): SPAWNING.replace("OLD", "NEW"),
        str(helper): "def word():\n    return 'new'\n",
    }
    said = rehearse_warm(str(script), instead=instead)
    assert said["stdout"].split("\n")[:2] == ["new NEW", "new NEW"]
    assert sorted(said["instead"]) == sorted(instead)
    assert script.read_text() == SPAWNING
    assert not (tmp_path / "__pycache__").exists()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("a = 1\nb = 2\nc = 3")
    return path


def found(file: Path, line: int, text: str = "", kind: str = "device-mismatch") -> Finding:
    edits = [Edit(str(file), (line, 0), (line, 5), text)] if text else []
    return Finding(kind, where=Place(str(file), line), edits=edits)


class Rehearsals:
    """Answers with what is found in a text, judged by what stands in it."""

    def __init__(self, judge: Callable[[str], list[Finding]], steps: int = 1) -> None:
        self.judge, self.steps, self.asked = judge, steps, 0

    def __call__(self, texts: Texts) -> Result:
        self.asked += 1
        findings = self.judge("".join(texts.values()))
        verdict = "fault" if findings else "clean"
        return Result(verdict, findings, {}, self.steps, 0.1, instead=sorted(texts))  # type: ignore[arg-type]


def test_fixes_that_all_help_take_one_rehearsal_and_make_a_patch(program: Path) -> None:
    result = Result("fault", [found(program, 1, "a = 10"), found(program, 3, "c = 30")], {}, 1, 0.1)
    again = Rehearsals(lambda text: [])
    texts = try_fixes(result, again)
    assert [one.tried for one in result.findings] == ["gone", "gone"]
    assert again.asked == 1
    (program.parent / "fixes.patch").write_text(patch(texts))
    assert program.read_text() == "a = 1\nb = 2\nc = 3"
    subprocess.run(["git", "apply", "fixes.patch"], cwd=program.parent, check=True)
    assert program.read_text() == "a = 10\nb = 2\nc = 30"


def test_a_fix_that_does_not_help_is_taken_back(program: Path) -> None:
    result = Result("fault", [found(program, 1, "z = 0\na = 1"), found(program, 3, "c = 30")], {}, 1, 0.1)

    def judge(text: str) -> list[Finding]:
        line = 2 if "z = 0" in text else 1
        return [found(program, line), *([] if "c = 30" in text else [found(program, line + 2)])]

    texts = try_fixes(result, Rehearsals(judge))
    assert [one.tried for one in result.findings] == ["remains", "gone"]
    assert not result.findings[0].edits
    assert list(texts.values()) == ["a = 1\nb = 2\nc = 30"]


def test_a_fix_that_only_trades_one_error_for_another_is_not_called_one(program: Path) -> None:
    result = Result("fault", [found(program, 1, "a = 10")], {}, 0, 0.1)
    worse = Rehearsals(lambda text: [found(program, 1, kind="other-error")], steps=0)
    assert try_fixes(result, worse) == {}
    assert result.findings[0].tried == "another"


def test_a_fix_with_which_the_program_trains_no_more_is_not_called_one(program: Path) -> None:
    result = Result("fault", [found(program, 1, "a = 10")], {}, 3, 0.1)
    assert try_fixes(result, Rehearsals(lambda text: [], steps=0)) == {}
    assert result.findings[0].tried == "idle"
    assert not result.findings[0].edits
    assert "that is no fix" in TRIED["idle"]


def test_what_shows_only_behind_a_fix_is_tried_in_turn(program: Path) -> None:
    def judge(text: str) -> list[Finding]:
        return [] if "c = 30" in text else [found(program, 3, "c = 30", "non-finite")]

    result = Result("fault", [found(program, 1, "a = 10")], {}, 0, 0.1)
    texts = try_fixes(result, Rehearsals(judge))
    assert [(one.kind, one.tried) for one in result.beyond] == [("non-finite", "gone")]
    assert list(texts.values()) == ["a = 10\nb = 2\nc = 30"]


def test_nothing_is_said_where_the_changed_file_was_never_read(program: Path) -> None:
    result = Result("fault", [found(program, 1, "a = 10")], {}, 1, 0.1)
    assert try_fixes(result, lambda texts: Result("clean", [], {}, 1, 0.1)) == {}
    assert result.findings[0].tried == ""


def test_edits_that_make_no_python_are_not_tried(program: Path) -> None:
    result = Result("fault", [found(program, 1, "a = (")], {}, 1, 0.1)
    again = Rehearsals(lambda text: [])
    try_fixes(result, again)
    assert again.asked == 0


def caused(kind: str, line: int, where: int, severity: Any = "fault", fix: str = "") -> Finding:
    return Finding(kind, severity, where=Place("train.py", where), cause=Cause("train.py", line), fix=fix)


def test_what_follows_from_a_fault_goes_under_it() -> None:
    garbage, nan = caused("garbage-buffer", 3, 9), caused("non-finite", 12, 12)
    assert fold([nan, garbage]) == [garbage]
    assert garbage.follows == [nan]


def test_one_line_to_change_is_one_finding_and_two_lines_are_two() -> None:
    first, second, third = (
        caused("device-mismatch", 3, 9),
        caused("device-mismatch", 3, 10),
        caused("device-mismatch", 4, 10),
    )
    assert fold([first, second, third]) == [first, third]
    assert first.follows == [second]


def test_two_faults_of_one_kind_with_causes_of_their_own_stand_both() -> None:
    first, second = caused("non-finite", 3, 9), caused("non-finite", 5, 11)
    assert fold([first, second]) == [first, second]


@pytest.mark.parametrize("first", ["h", "torch.fft.fft(h, dim=-1)"])
def test_what_a_chain_of_transforms_takes_is_widened(
    rehearse_warm: Rehearse, tmp_path: Path, first: str
) -> None:
    """Between two transforms numbers are complex: float() would drop half of each."""
    path = tmp_path / "program.py"
    path.write_text(
        'import torch\nh = torch.randn(2, 6, 8, device="cuda", dtype=torch.float16)\n'
        f"print(torch.fft.fft({first}, dim=-2).real.sum())\n"
    )
    (finding,) = rehearse_warm(str(path), gpus=1)["findings"]
    assert finding["fix"] == "Compute it in float32: h.float()."
