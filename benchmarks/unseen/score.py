"""Scores a rehearsal on faults that no rule was written for: what is found, and which line is named.

    python benchmarks/unseen/score.py first|second|third path/to/trimtab [NAME …]

Each program is a fault from a public report (truth.json says which), in our own words, written down with its true line
and fix before any rehearsal saw it. Its repaired twin is made by the changes that truth.json holds, and must be clean.
The fixes are for people to read. The set is for judging alone: what it shows must not become a rule.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def rehearse(tool: str, program: Path, truth: dict[str, Any], *options: str) -> dict[str, Any]:
    """The report of one rehearsal."""
    report = program.with_suffix(".json")
    gpus, ranks = str(truth.get("gpus", 2)), truth["ranks"]
    words = [tool, "rehearse", "--gpus", gpus, "--timeout", "150", "--json", str(report), *options]
    words += ["--ranks", str(ranks)] if ranks else []
    done = subprocess.run(
        [*words, str(program)], capture_output=True, text=True, cwd=program.parent, check=False
    )
    if not report.exists():
        return {"verdict": f"exit {done.returncode}", "findings": []}
    return json.loads(report.read_text())


def named(finding: dict[str, Any]) -> set[int]:
    """The line that a finding names (its cause's, else where it failed) and those that its fix changes."""
    place = finding["cause"] or finding["where"] or {}
    return {place.get("line", 0)} | {edit["start"][0] for edit in finding["edits"]}


def judged(
    tool: str, truth: dict[str, Any], text: str, folder: Path
) -> tuple[bool, bool, bool, list[dict[str, Any]]]:
    """Whether the fault was found, its line named and its twin clean; and the findings that are faults."""
    faulty, fixed = folder / f"{truth['name']}.py", folder / f"{truth['name']}_fixed.py"
    faulty.write_text(text)
    for old, new in truth["changes"]:
        text = text.replace(old, new)
    fixed.write_text(text)
    report = rehearse(tool, faulty, truth, "--try-fixes")
    faults = [finding for finding in report["findings"] if finding["severity"] == "fault"]
    clean = rehearse(tool, fixed, truth)["verdict"] == "clean"
    return (
        report["verdict"] == "fault",
        any(named(finding) & set(truth["lines"]) for finding in faults),
        clean,
        faults,
    )


def main(which: str, tool: str, names: list[str]) -> None:
    """Print a line for each fault, then the sums."""
    sums = [0, 0, 0]
    truths = [
        t for t in json.loads((HERE / which / "truth.json").read_text()) if not names or t["name"] in names
    ]
    for truth in truths:
        with tempfile.TemporaryDirectory() as folder:
            *marks, faults = judged(
                tool, truth, (HERE / which / f"{truth['name']}.py").read_text(), Path(folder)
            )
        sums = [total + mark for total, mark in zip(sums, marks, strict=True)]
        words = [
            word if mark else f"NOT {word}"
            for word, mark in zip(("found", "line", "clean"), marks, strict=True)
        ]
        print(f"{truth['name']:44}", *words, [finding["kind"] for finding in faults], flush=True)
        for finding in faults:
            print("    ", finding["fix"], f"[{finding['tried'] or 'not tried'}]")
        print("     true:", truth["fix"], flush=True)
    found, line, clean = sums
    print(f"found {found}, line named {line}, twins clean {clean} of {len(truths)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
