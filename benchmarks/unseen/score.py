"""Scores a rehearsal on faults that no rule was written for: what is found, and which line is named.

    python benchmarks/unseen/score.py path/to/trimtab [NAME …]

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


def rehearse(tool: str, program: Path, ranks: int, *options: str) -> dict[str, Any]:
    """The report of one rehearsal."""
    report = program.with_suffix(".json")
    words = [tool, "rehearse", "--gpus", "2", "--timeout", "150", "--json", str(report), *options]
    words += ["--ranks", str(ranks)] if ranks else []
    done = subprocess.run(
        [*words, str(program)], capture_output=True, text=True, cwd=program.parent, check=False
    )
    if not report.exists():
        return {"verdict": f"exit {done.returncode}", "findings": []}
    return json.loads(report.read_text())


def judged(tool: str, truth: dict[str, Any], folder: Path) -> tuple[bool, bool, bool, list[dict[str, Any]]]:
    """Whether the fault was found, its line named and its twin clean; and the findings that are faults."""
    text = (HERE / f"{truth['name']}.py").read_text()
    faulty, fixed = folder / f"{truth['name']}.py", folder / f"{truth['name']}_fixed.py"
    faulty.write_text(text)
    for old, new in truth["changes"]:
        text = text.replace(old, new)
    fixed.write_text(text)
    report = rehearse(tool, faulty, truth["ranks"], "--try-fixes")
    faults = [finding for finding in report["findings"] if finding["severity"] == "fault"]
    lines = [(finding["cause"] or finding["where"] or {}).get("line") for finding in faults]
    clean = rehearse(tool, fixed, truth["ranks"])["verdict"] == "clean"
    return report["verdict"] == "fault", any(line in truth["lines"] for line in lines), clean, faults


def main(tool: str, names: list[str]) -> None:
    """Print a line for each fault, then the sums."""
    sums = [0, 0, 0]
    truths = [t for t in json.loads((HERE / "truth.json").read_text()) if not names or t["name"] in names]
    for truth in truths:
        with tempfile.TemporaryDirectory() as folder:
            *marks, faults = judged(tool, truth, Path(folder))
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
    main(sys.argv[1], sys.argv[2:])
