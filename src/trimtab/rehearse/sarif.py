"""A rehearsal's report as SARIF 2.1.0, which GitHub code scanning and editors read. Makes data; writes no file.

Each kind of finding is a rule. A result stands at the line to change; the line that fails, the line inside a library
and the births of the tensors are related locations. A fix that is code becomes a SARIF fix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.diagnose.finding import KINDS, Edit, Finding, Place
from trimtab.rehearse.annotations import in_repository, place_of, text_of
from trimtab.rehearse.verdict import Result

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HELP = "https://github.com/trimtab/trimtab/blob/main/docs/rehearse.md"


def sarif(result: Result, root: Path) -> dict[str, Any]:
    """The whole log: one run."""
    kinds = sorted({finding.kind for finding in result.findings})
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "trimtab rehearse",
                        "semanticVersion": __version__,
                        "informationUri": _HELP,
                        "rules": [_rule(kind) for kind in kinds],
                    }
                },
                "automationDetails": {"id": f"trimtab-rehearse/{_name(result.target, root)}"},
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {"ROOT": {"uri": root.resolve().as_uri() + "/"}},
                "invocations": [
                    {
                        "executionSuccessful": result.verdict != "unproven",
                        "toolExecutionNotifications": [
                            {"level": "note", "message": {"text": note}} for note in result.notes
                        ],
                    }
                ],
                "results": [_result(finding, kinds, result, root) for finding in result.findings],
            }
        ],
    }


def _rule(kind: str) -> dict[str, Any]:
    said = KINDS[kind]
    return {
        "id": kind,
        "name": "".join(part.capitalize() for part in kind.split("-")),
        "shortDescription": {"text": said},
        "fullDescription": {"text": f"In a rehearsal on virtual GPUs: {said}."},
        "help": {"text": f"{said}. How it is found: {_HELP}"},
        "helpUri": _HELP,
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["training", "gpu"], "precision": "high", "problem.severity": "error"},
    }


def _result(finding: Finding, kinds: list[str], result: Result, root: Path) -> dict[str, Any]:
    place = place_of(finding, root)
    # Code scanning shows nothing without a location: what has no line of its own stands at the script's first.
    location = _location(place, root) if place else _at_target(result.target, root)
    built: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": kinds.index(finding.kind),
        "level": "error" if finding.severity == "fault" else "warning",
        "message": {"text": text_of(finding)},
        "locations": [location],
        # The name under which code scanning looks for it.
        "partialFingerprints": {"primaryLocationLineHash": f"{_fingerprint(finding, place, root)}:1"},
    }
    related = [
        {"id": number, **_location(other, root), "message": {"text": said}}
        for number, (said, other) in enumerate(_related(finding, place), 1)
    ]
    fix = _fix(finding, root)
    return {
        **built,
        **({"relatedLocations": related} if related else {}),
        **({"fixes": [fix]} if fix else {}),
        **({"occurrenceCount": finding.count} if finding.count > 1 else {}),
    }


def _related(finding: Finding, main: Place | None) -> Iterator[tuple[str, Place]]:
    cause, seen = finding.cause, {(main.file, main.line)} if main else set()
    named: list[tuple[str, Place | None]] = [
        ("the line that fails", finding.where),
        (cause.why if cause and cause.why else "the cause", cause),
        ("the line inside a library", finding.library),
        *(
            (f"{note.name} ({note.device}, {note.dtype}) was made here", note.born)
            for note in finding.tensors
        ),
    ]
    for said, place in named:
        if place is not None and place.line > 0 and (place.file, place.line) not in seen:
            seen.add((place.file, place.line))
            yield said, place


def _location(place: Place, root: Path) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": place.line}
    if place.code:
        region["snippet"] = {"text": place.code}
    return {"physicalLocation": {"artifactLocation": _artifact(place.file, root), "region": region}}


def _at_target(target: str, root: Path) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": _artifact(target, root), "region": {"startLine": 1}}}


def _artifact(file: str, root: Path) -> dict[str, str]:
    inside = in_repository(file, root)
    if inside is not None:
        return {"uri": _quoted(inside), "uriBaseId": "ROOT"}
    return {"uri": Path(file).resolve().as_uri()}


def _quoted(path: str) -> str:
    from urllib.parse import quote

    return quote(path)


def _fix(finding: Finding, root: Path) -> dict[str, Any] | None:
    """The edits as SARIF takes them: columns count from 1."""
    if not finding.edits or finding.tried == "remains":
        return None
    edits = sorted(finding.edits, key=lambda edit: (edit.file, edit.start))
    return {
        "description": {"text": finding.fix or "the change that mends it"},
        "artifactChanges": [
            {
                "artifactLocation": _artifact(file, root),
                "replacements": [_replacement(edit) for edit in group],
            }
            for file, group in groupby(edits, key=lambda edit: edit.file)
        ],
    }


def _replacement(edit: Edit) -> dict[str, Any]:
    (line, column), (end_line, end_column) = edit.start, edit.end
    return {
        "deletedRegion": {
            "startLine": line,
            "startColumn": column + 1,
            "endLine": end_line,
            "endColumn": end_column + 1,
        },
        "insertedContent": {"text": edit.text},
    }


def _fingerprint(finding: Finding, place: Place | None, root: Path) -> str:
    """The same when lines above are added or removed: of the kind, the file and the line's text."""
    file = (in_repository(place.file, root) or place.file) if place else ""
    parts = (finding.kind, file, place.code.strip() if place else finding.message)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _name(target: str, root: Path) -> str:
    return in_repository(target, root) or Path(target).name
