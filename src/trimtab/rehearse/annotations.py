"""Findings as annotations of a GitHub workflow: lines that the runner shows beside the code. Writes nothing itself.

Faults are errors, warnings are warnings; why nothing is proven is a notice.
"""

from __future__ import annotations

from pathlib import Path

from trimtab.diagnose.finding import KINDS, Finding, Place
from trimtab.rehearse.verdict import Result


def repository(folder: Path) -> Path:
    """The root of the repository that a folder lies in; the folder itself where there is none."""
    found = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
    return found or folder


def in_repository(file: str, root: Path) -> str | None:
    """A file as the repository calls it; None when it lies elsewhere (an installed package)."""
    path = Path(file).resolve()
    if not path.is_relative_to(root.resolve()) or "site-packages" in path.parts:
        return None
    return path.relative_to(root.resolve()).as_posix()


def place_of(finding: Finding, root: Path) -> Place | None:
    """Where a reader is to look: the line to change, or else the line that fails, if it lies in the repository."""
    places = (finding.cause, finding.where)
    return next(
        (place for place in places if place and place.line > 0 and in_repository(place.file, root)), None
    )


def text_of(finding: Finding) -> str:
    """What a finding says, why, and what to do, as plain text."""
    parts = [finding.message.strip() or KINDS[finding.kind]]
    if finding.cause is not None and finding.cause.why:
        parts.append(f"Cause: {finding.cause.why}")
    if finding.fix:
        parts.append(f"Fix: {finding.fix}")
    return "\n".join(parts)


def as_annotations(result: Result, root: Path) -> list[str]:
    """One line for each finding and for each reason why nothing is proven."""
    lines = []
    for finding in result.findings:
        place = place_of(finding, root)
        where = {"file": in_repository(place.file, root) or "", "line": str(place.line)} if place else {}
        level = "error" if finding.severity == "fault" else "warning"
        lines.append(_command(level, {**where, "title": f"rehearse: {finding.kind}"}, text_of(finding)))
    if result.verdict == "unproven":
        said = "; ".join(result.notes) or "nothing was proven"
        lines.append(_command("notice", {"title": "rehearse: unproven"}, f"{result.target}: {said}"))
    return lines


def _command(level: str, properties: dict[str, str], text: str) -> str:
    named = ",".join(f"{name}={_escaped(value, also=':,')}" for name, value in properties.items())
    return f"::{level} {named}::{_escaped(text)}"


def _escaped(text: str, also: str = "") -> str:
    """As the runner reads it: % first, then line ends, and in properties what separates them."""
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
