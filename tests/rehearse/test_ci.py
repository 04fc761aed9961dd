"""What a rehearsal says to a CI system: annotations of a GitHub workflow, and SARIF."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.diagnose.finding import Cause, Edit, Finding, Place, TensorNote
from trimtab.rehearse.annotations import as_annotations, repository
from trimtab.rehearse.sarif import sarif
from trimtab.rehearse.verdict import Result


@pytest.fixture
def result(tmp_path: Path) -> Result:
    (tmp_path / ".git").mkdir()
    (tmp_path / "my code").mkdir()
    script = str(tmp_path / "my code" / "train, v2.py")
    fault = Finding(
        kind="device-mismatch",
        message="Expected all tensors to be on the same device,\n100% sure: cuda:0 and cpu",
        where=Place(script, 9, "out = out * scale"),
        cause=Cause(script, 5, "scale = torch.ones(2)", "made on the CPU"),
        fix='Write scale = torch.ones(2, device="cuda").',
        tensors=[
            TensorNote("scale", "cpu", "float32", (2,), Place(script, 5)),
            TensorNote("out", "cuda:0", "float32"),
        ],
        count=3,
        library=Place("/usr/lib/python3/site-packages/torch/x.py", 7),
        edits=[Edit(script, (5, 20), (5, 20), ', device="cuda"')],
    )
    warning = Finding(kind="data-order", severity="warning", message="the same order in every epoch")
    return Result("fault", [fault, warning], {}, 3, 1.0, ["a note"], target=script)


def test_annotations_stand_at_the_line_to_change(result: Result, tmp_path: Path) -> None:
    assert repository(tmp_path / "my code") == tmp_path
    assert as_annotations(result, tmp_path) == [
        "::error file=my code/train%2C v2.py,line=5,title=rehearse%3A device-mismatch::Expected all tensors to be on "
        "the same device,%0A100%25 sure: cuda:0 and cpu%0ACause: made on the CPU%0AFix: Write scale = torch.ones(2, "
        'device="cuda").',
        "::warning title=rehearse%3A data-order::the same order in every epoch",
    ]


def test_a_line_outside_of_the_repository_is_not_named(result: Result, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    assert as_annotations(result, elsewhere)[0].startswith("::error title=rehearse%3A device-mismatch::")


def test_what_is_not_proven_is_a_notice(tmp_path: Path) -> None:
    result = Result("unproven", [], {}, 0, 1.0, ["time ran out after 5 s"], target="train.py")
    assert as_annotations(result, tmp_path) == [
        "::notice title=rehearse%3A unproven::train.py: time ran out after 5 s"
    ]


def test_sarif_has_what_code_scanning_asks_for(result: Result, tmp_path: Path) -> None:
    log = json.loads(json.dumps(sarif(result, tmp_path)))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    rules = run["tool"]["driver"]["rules"]
    fault, warning = run["results"]
    for one in run["results"]:
        assert rules[one["ruleIndex"]]["id"] == one["ruleId"]
        assert one["message"]["text"]
        assert one["partialFingerprints"]["primaryLocationLineHash"]
    assert (fault["level"], warning["level"]) == ("error", "warning")
    place = fault["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "my%20code/train%2C%20v2.py", "uriBaseId": "ROOT"}
    assert place["region"]["startLine"] == 5
    related = [one["physicalLocation"]["region"]["startLine"] for one in fault["relatedLocations"]]
    assert related == [9, 7], (
        "the line that fails, and the library's; the tensor was made at the line to change"
    )
    (change,) = fault["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 5, "startColumn": 21, "endLine": 5, "endColumn": 21},
            "insertedContent": {"text": ', device="cuda"'},
        }
    ]
    # A warning without a line stands at the script.
    script = warning["locations"][0]["physicalLocation"]
    assert (script["artifactLocation"]["uri"], script["region"]["startLine"]) == (
        "my%20code/train%2C%20v2.py",
        1,
    )


def test_a_fingerprint_outlives_lines_that_are_added_above(result: Result, tmp_path: Path) -> None:
    def prints() -> list[str]:
        return [
            one["partialFingerprints"]["primaryLocationLineHash"]
            for one in sarif(result, tmp_path)["runs"][0]["results"]
        ]

    before = prints()
    cause = result.findings[0].cause
    assert cause is not None
    result.findings[0].cause = Cause(cause.file, cause.line + 10, cause.code, cause.why)
    assert prints() == before


def test_the_verb_prints_annotations_and_writes_sarif(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text("open('left', 'w').close()\nraise SystemExit('no data')\n")
    command = [sys.executable, "-m", "trimtab", "rehearse", "--github", "--sarif", "out.sarif", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "::error file=train.py,line=2,title=rehearse%3A other-error::" in done.stdout
    (one,) = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "train.py"
    command[4:7] = ["--keep-files", "."]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (refused.returncode, "it is not empty" in refused.stderr) == (2, True)


def test_a_file_that_is_no_report_of_ours_is_not_replaced(tmp_path: Path) -> None:
    script, mine = tmp_path / "train.py", {"--json": tmp_path / "a.json", "--sarif": tmp_path / "b.json"}
    script.write_text("print(1)\n")
    command = [sys.executable, "-m", "trimtab", "rehearse"]
    for option, path in mine.items():
        path.write_text('{"mine": 1}')
        refused = subprocess.run(
            [*command, option, str(path), str(script)], capture_output=True, text=True, cwd=tmp_path
        )
        assert refused.returncode == 2
        assert "no report of Trimtab" in refused.stderr
        assert path.read_text() == '{"mine": 1}'
        path.write_text("")
    both = [word for option, path in mine.items() for word in (option, str(path))]
    for _ in range(2):  # empty files, then the reports that stand there
        done = subprocess.run([*command, *both, str(script)], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 3, done.stdout + done.stderr  # a program without torch proves nothing
    assert all(path.read_text().startswith("{") for path in mine.values())
