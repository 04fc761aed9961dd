"""Tries the fixes of a rehearsal: rehearses again with each finding's edits in place, and says what that showed.

The user's files are read with another text (`instead`) and never touched. Only a fault that was seen to be gone, with
no other one in its place, is called so; a fix that does not help is taken back. `patch` writes down what helped.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trimtab.diagnose import rewrite
from trimtab.diagnose.finding import Edit, Finding
from trimtab.rehearse.run import rehearse
from trimtab.rehearse.session import Settings
from trimtab.rehearse.verdict import Result

Texts = dict[str, str]
"""The program's changed files, whole, by their real path."""
Again = Callable[[Texts], Result]
"""Rehearses the same program with its files read so."""
_NO_NEWLINE = "\\ No newline at end of file\n"
_ROUNDS = 4
"""How often what shows only behind a fix is looked at in turn."""


def tried_silently(words: list[str], settings: Settings, **options: Any) -> Again:
    """How a rehearsal is made again: as before, and without the program's output."""

    def again(texts: Texts) -> Result:
        with nothing_printed():
            return rehearse(words, replace(settings, instead=texts), **options)

    return again


@contextlib.contextmanager
def nothing_printed() -> Iterator[None]:
    """What this process and its children print goes nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    real = [(stream, os.dup(stream)) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream, _ in real:
            os.dup2(nowhere, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, kept in real:
            os.dup2(kept, stream)
            os.close(kept)
        os.close(nowhere)


def try_fixes(result: Result, again: Again, tell: Callable[[str], None] = lambda _: None) -> Texts:
    """Mark each finding that has edits with what a rehearsal with them showed; answers with the files that help.

    What is found only when the first faults are gone is put into `result.beyond`, and tried as well.
    """
    texts: Texts = {}
    latest, steps = result.findings, result.steps
    for _ in range(_ROUNDS):
        open_ = [one for one in latest if one.edits and not one.tried]
        if not open_:
            break
        tell(f"trying the fixes of {len(open_)} finding{'s' * (len(open_) > 1)} …")
        known = [*result.findings, *result.beyond]
        kept, trial = _round(open_, latest, known, texts, steps, again)
        if trial is None:
            break
        latest, steps = _fresh(trial.findings, latest, texts, kept), trial.steps
        texts = kept
        result.beyond += latest
    for finding in (*result.findings, *result.beyond):
        if finding.tried in ("remains", "idle"):
            finding.edits = []
    return texts


def _round(
    open_: list[Finding], latest: list[Finding], known: list[Finding], texts: Texts, steps: int, again: Again
) -> tuple[Texts, Result | None]:
    """All together; and one after the other where that does not show them all gone. The texts that helped."""
    if len(open_) > 1 and (together := _changed(texts, open_)) is not None:
        trial = again(together)
        if not _setback(trial, latest, texts, together, steps) and all(
            _judge(one, trial, latest, texts, together, steps) == "gone" for one in open_
        ):
            for one in open_:
                one.tried = "gone"
            return together, trial
    kept, last = texts, None
    for one in open_:
        # Edits of one round are all about the same text: what helped already is put in with them.
        helped = [other for other in open_ if other.tried == "gone"]
        changed = _changed(texts, [*helped, one])
        if changed is None:
            continue
        trial = again(changed)
        one.tried = _judge(one, trial, [*latest, *known], texts, changed, steps)
        if one.tried == "gone":
            kept, last = changed, trial
    return kept, last


def _judge(
    finding: Finding, trial: Result, latest: list[Finding], before: Texts, after: Texts, steps: int
) -> str:
    """gone, remains, another (gone, and another fault stands in its way), idle (gone, as every optimizer step is), or
    nothing where it cannot be told."""
    if not {os.path.realpath(edit.file) for edit in finding.edits} <= set(trial.instead):
        return ""
    places = _Places(before, after)
    if any(one.kind == finding.kind and places.same(one, finding) for one in _flat(trial.findings)):
        return "remains"
    if _setback(trial, latest, before, after, steps):
        return "another"
    if trial.verdict == "unproven":
        return ""
    return "idle" if steps and not trial.steps else "gone"


def _setback(trial: Result, latest: list[Finding], before: Texts, after: Texts, steps: int) -> bool:
    """Whether the program now stops at something new, and comes no further than it did."""
    places = _Places(before, after)
    new = [
        one
        for one in trial.findings
        if one.severity == "fault" and not any(places.same(one, old) for old in _flat(latest))
    ]
    return bool(new) and trial.steps <= steps


def _fresh(found: list[Finding], latest: list[Finding], before: Texts, after: Texts) -> list[Finding]:
    """The findings that were not among those of the round before."""
    places = _Places(before, after)
    return [one for one in found if not any(places.same(one, old) for old in _flat(latest))]


def _flat(findings: Iterable[Finding]) -> list[Finding]:
    return [one for finding in findings for one in (finding, *finding.follows)]


class _Places:
    """Where a line of a changed file stood before the change."""

    def __init__(self, before: Texts, after: Texts) -> None:
        self._lines: dict[str, list[int]] = {}
        for file, text in after.items():
            self._lines[file] = _origins(_text(before, file).splitlines(), text.splitlines())

    def same(self, new: Finding, old: Finding) -> bool:
        """Whether a finding of the changed program is one of the program before."""
        if new.kind != old.kind:
            return False
        # One line can meet two strays: what tells them apart is the line that made each.
        for now, then in ((new.cause, old.cause), (new.where, old.where)):
            if now is not None and then is not None:
                return self._was(now.file, now.line) == (_real(then.file), then.line)
        return new.message == old.message

    def _was(self, file: str, line: int) -> tuple[str, int]:
        file = _real(file)
        origins = self._lines.get(file)
        return file, origins[line - 1] if origins is not None and 0 < line <= len(origins) else line


def _origins(old: list[str], new: list[str]) -> list[int]:
    """For each line of a new text, the line that it was, or whose place it took, in the old one."""
    lines: list[int] = []
    for _, first, last, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for number in range(end - start):
            lines.append(min(first + number, max(first, last - 1)) + 1)
    return lines


def _changed(texts: Texts, findings: Sequence[Finding]) -> Texts | None:
    """The files with the findings' edits made; None when they overlap, or what comes out is no Python."""
    edits = {edit: None for finding in findings for edit in finding.edits}
    files: dict[str, list[Edit]] = {}
    for edit in edits:
        files.setdefault(_real(edit.file), []).append(edit)
    changed = dict(texts)
    for file, own in files.items():
        own.sort(key=lambda edit: (edit.start, edit.end))
        if any(first.end > second.start for first, second in pairwise(own)):
            return None
        changed[file] = rewrite.applied(_text(texts, file), own)
        try:
            compile(changed[file], file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
    return changed


def _text(texts: Texts, file: str) -> str:
    return texts[file] if file in texts else _read(file)


def _read(file: str) -> str:
    """A file as it is, its ends of lines too."""
    with Path(file).open(encoding="utf-8", newline="") as opened:
        return opened.read()


def _real(file: str) -> str:
    return os.path.realpath(file)


def patch(texts: Texts) -> str:
    """The changes as a patch that `git apply` and `patch -p1` take, from the working directory."""
    parts: list[str] = []
    for file, text in sorted(texts.items()):
        name = os.path.relpath(file)
        name = name if not name.startswith("..") else file.lstrip(os.sep)
        old = _read(file).splitlines(keepends=True)
        parts += difflib.unified_diff(old, text.splitlines(keepends=True), f"a/{name}", f"b/{name}")
    return "".join(part if part.endswith("\n") else f"{part}\n{_NO_NEWLINE}" for part in parts)
