"""What the parent knows about a failure that the script's processes do not: an overlay that could not take a write, an
option of ours that stands after the script, a model whose config alone is here."""

from __future__ import annotations

import os
import re

from trimtab.diagnose.finding import Finding
from trimtab.rehearse import room_here
from trimtab.rehearse.files_aside import Apart
from trimtab.rehearse.session import Gathered
from trimtab.rehearse.target import Target

_OPTIONS = re.compile(
    r"--(gpus|ranks|max-steps|shapes-only|timeout|json|html|github|sarif|keep-files|in-place|try-fixes|write-fixes)"
)
"""Options of `trimtab rehearse`, which stand before the script."""


def set_aside(gathered: Gathered, files: Apart) -> None:
    """Errors that are not the script's are no findings: nothing is proven because of them."""
    for finding in list(gathered.findings):
        why = files.blamed(finding.message)
        if why is not None:
            gathered.findings.remove(finding)
            gathered.unproven = True
            gathered.notes.append(why)


def hints(findings: list[Finding], gathered: Gathered, target: Target, *, shapes_only: bool) -> list[str]:
    """What the person at the console could have meant, or could try instead."""
    return [*_misplaced(findings, gathered, target), *([] if shapes_only else _weightless(findings))]


def _weightless(findings: list[Finding]) -> list[str]:
    """Models that an error names by their folder, and of which only the config lies there."""
    words = [word.strip("'\"`()").rstrip(".,;:'\"`)") for found in findings for word in found.message.split()]
    return [
        f"{folder} holds a model's config and no weights; --shapes-only rehearses it from that alone"
        for folder in dict.fromkeys(words)
        if os.path.isfile(os.path.join(folder, "config.json")) and not room_here.holds_weights(folder)
    ]


def _misplaced(findings: list[Finding], gathered: Gathered, target: Target) -> list[str]:
    """Our own options among the script's words, where the script does not know them."""
    ours = [
        word for word in (part.partition("=")[0] for part in target.own_words) if _OPTIONS.fullmatch(word)
    ]
    if not ours:
        return []
    # argparse and click end with status 2 after a message that only the console has seen; others raise it.
    usage = any(end["how"] == "exit" and end["status"] == 2 for end in gathered.ends.values())
    refused = [word for word in ours if usage or any(word in finding.message for finding in findings)]
    if not refused:
        return []
    names = " and ".join(dict.fromkeys(refused))
    return [
        f"{names} stood after the script, so the script was given it; an option for rehearse stands before the script"
    ]
