"""The rehearsal's report for the console: findings, notes, then the verdict in one line. Plain text, no markup.

Colours are used only when the output is a terminal.
"""

from __future__ import annotations

import os
import re
import sysconfig
import textwrap
from collections.abc import Callable

from trimtab.diagnose.finding import Finding, Place
from trimtab.errors import shown
from trimtab.rehearse import memory_text
from trimtab.rehearse.session import WORDS, AskedAt
from trimtab.rehearse.verdict import Result
from trimtab.rehearse.written import sentence

_RED, _YELLOW, _GREEN, _BOLD, _DIM, _OFF = "31", "33", "32", "1", "2", "0"
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
_WIDTH = 110
Paint = Callable[[str, str], str]
_LABEL = 8
_COMMAND = re.compile(r"^(\s*)::")
"""How a line begins that steers a GitHub workflow: none of a program's texts is to."""
TRIED = {
    "gone": "with this change the fault is gone",
    "another": "with this change the fault is gone, and the program stops at another one: not proven",
    "idle": "with this change the fault is gone, and so is every optimizer step: that is no fix",
}
"""What a rehearsal with the fix in place showed."""


def render(result: Result, *, colour: bool = False) -> str:
    """The whole report."""

    def paint(code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[{_OFF}m" if colour else text

    blocks = [_block(number, finding, paint) for number, finding in enumerate(result.findings, 1)]
    if result.beyond:
        blocks.append(paint(_BOLD, "with these changes made, the program comes further, and meets:"))
        first = len(result.findings) + 1
        blocks += [_block(number, finding, paint) for number, finding in enumerate(result.beyond, first)]
    if any(finding.kind == "ranks-disagree" for finding in result.findings):
        blocks += _collectives(result, paint)
    ends = [*_not_proven(result, paint), *_memory(result, paint), *_files(result), *_notes(result)]
    ends.append(_verdict(result, paint))
    return "\n\n".join([*blocks, *ends])


_LAST = 5


def _collectives(result: Result, paint: Paint) -> list[str]:
    """Where ranks disagree: the last collectives of each, side by side with what it gave."""
    if len(result.collectives) < 2 or not any(rank.calls for rank in result.collectives):
        return []
    lines = [paint(_BOLD, "the last collectives of each rank")]
    for rank in result.collectives:
        for calls in rank.calls[-_LAST:]:
            size = f"{calls.elements:,} {calls.dtype}" if calls.dtype else ""
            times = f" × {calls.count}" if calls.count > 1 else ""
            at = f"{_short(calls.where.file)}:{calls.where.line}" if calls.where else ""
            lines.append(
                f"   rank {rank.rank}  step {calls.step}  {calls.op:<24}{size + times:<32}{at}".rstrip()
            )
    return ["\n".join(lines)]


def _notes(result: Result) -> list[str]:
    """What limits the verdict; why nothing is proven stands in the verdict itself."""
    said = result.notes if result.verdict != "unproven" else []
    return ["\n".join(line for note in said for line in _field("note", _in_one_line(note)))] if said else []


def _memory(result: Result, paint: Paint) -> list[str]:
    """What the GPUs held."""
    lines = memory_text.table(result.memory, _line_of)
    return ["\n".join([paint(_BOLD, "memory"), *lines])] if lines else []


def _files(result: Result) -> list[str]:
    """What became of the files that the program wrote."""
    said = sentence(result.files)
    return ["\n".join(_field("files", said))] if said else []


def _not_proven(result: Result, paint: Paint) -> list[str]:
    """Where the program asked for values, of which shapes have none. What decides is told line by line; of the rest
    only the program's own lines, each with the places in libraries that it led to."""
    if not result.asked:
        return []
    lines: list[str] = []
    deciding = [asked for asked in result.asked if asked.decides]
    if deciding:
        lines.append(
            paint(_YELLOW, "not proven: what the program does hangs on values that shapes do not have")
        )
    for asked in deciding:
        place = asked.where or asked.inside
        lines += _field(WORDS[asked.how], asked.op if place is None else _line_of(place), 12)
        if asked.where is not None and asked.inside is not None:
            lines += _field("", f"inside {_line_of(asked.inside)}", 12)
    shown_only = [asked for asked in result.asked if not asked.decides and asked.how != "watch"]
    watched = sum(asked.how == "watch" for asked in result.asked)
    if shown_only or watched:
        lines.append(
            paint(
                _DIM,
                "not known: values that were asked for, and that nothing was seen to hang on (printed as ?)",
            )
        )
    for (how, line), group in _by_line(shown_only).items():
        lines += _field(WORDS[how], line, 12)
        if inside := _places([asked.inside for asked in group if asked.where and asked.inside]):
            lines += _field("", f"inside {inside}", 12)
    if watched:
        what = "whether losses and gradients are finite, and how large they are"
        lines += _field(WORDS["watch"], f"Trimtab itself, at {watched} lines of its own: {what}", 12)
    return ["\n".join(lines)]


def _by_line(asked: list[AskedAt]) -> dict[tuple[str, str], list[AskedAt]]:
    found: dict[tuple[str, str], list[AskedAt]] = {}
    for one in asked:
        place = one.where or one.inside
        found.setdefault((one.how, one.op if place is None else _line_of(place)), []).append(one)
    return found


def _places(places: list[Place | None]) -> str:
    """Lines of libraries, those of one file together."""
    lines: dict[str, list[int]] = {}
    for place in filter(None, places):
        lines.setdefault(_short(place.file), []).append(place.line)
    return "; ".join(f"{file}:{', '.join(map(str, sorted(set(at))))}" for file, at in lines.items())


def _block(number: int, finding: Finding, paint: Paint) -> str:
    times = f"  ({finding.count} times)" if finding.count > 1 else ""
    head = f"{number}. {finding.kind}" + ("" if finding.severity == "fault" else "  (warning)") + times
    lines = [paint(_RED if finding.severity == "fault" else _YELLOW, head)]
    lines += _field("says", _shortened(finding.message))
    for label, place in (("where", finding.where), ("inside", finding.library)):
        lines += _field(label, _line_of(place)) if place else []
    if finding.module:
        lines += _field("module", finding.module)
    for tensor in finding.tensors:
        shape = ", ".join(map(str, tensor.shape))
        born = f", made at {_short(tensor.born.file)}:{tensor.born.line}" if tensor.born else ""
        lines += _field("tensor", f"{tensor.name}: {tensor.device} {tensor.dtype} [{shape}]{born}")
    if finding.cause:
        cause, where = finding.cause, finding.where
        if where is None or (cause.file, cause.line) != (where.file, where.line):
            lines += _field("cause", _line_of(cause))
            lines += _field("", cause.why) if cause.why else []
        else:
            lines += _field("cause", cause.why)
    if finding.tried == "remains":
        lines += _field("tried", f"it does not help, the fault remains: {finding.fix}")
    elif finding.fix:
        lines += _field("fix", finding.fix)
        lines += _field("tried", TRIED[finding.tried]) if finding.tried else []
    for saving in finding.savings:
        written = " ".join(saving.settings) or saving.how
        set_ = f" ({written})" if written and written not in finding.fix else ""
        end = "then it fits" if saving.fits else "and it still does not fit"
        saves = f"{memory_text.size(saving.saved_bytes)} less, {memory_text.size(saving.need_bytes)} in all"
        lines += _field("saves", f"{saving.change}{set_}: {saves}, {end}")
    for other in finding.follows:
        place = other.where or other.cause
        words = f"{other.kind}{f' at {_line_of(place)}' if place else f': {_shortened(other.message)}'}"
        lines += _field("also", words)
    return "\n".join(lines)


def _field(label: str, text: str, width: int = _LABEL) -> list[str]:
    head = f"   {label:<{width}}"
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(
            shown(paragraph),
            _WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
        head = " " * len(head)
    return [_COMMAND.sub(r"\1: :", line) for line in lines]


def _shortened(message: str) -> str:
    """Long library messages are cut: the first lines say what it is."""
    lines = message.strip().splitlines()
    text = "\n".join(lines[:4])
    return text if len(text) <= 600 and len(lines) <= 4 else text[:600] + " …"


def _in_one_line(text: str) -> str:
    return shown(" ".join(text.split()))


def _line_of(place: Place) -> str:
    return shown(f"{_short(place.file)}:{place.line}" + (f"   {place.code}" if place.code else "")).replace(
        "\n", " "
    )


def _short(file: str) -> str:
    """A path relative to the working directory when it lies beneath it, else from the package's name on, or from the
    standard library on."""
    for marker in ("site-packages", "dist-packages"):
        if f"{os.sep}{marker}{os.sep}" in file:
            return file.split(f"{os.sep}{marker}{os.sep}", 1)[1]
    relative = os.path.relpath(file)
    return file.removeprefix(_STANDARD) if relative.startswith("..") else relative


def _verdict(result: Result, paint: Paint) -> str:
    name = _in_one_line(_short(result.target))
    faults = sum(finding.severity == "fault" for finding in result.findings)
    warnings = len(result.findings) - faults
    seen = f"{result.steps} optimizer step{'s' * (result.steps != 1)}, {result.seconds:.1f} s"
    facts = "; ".join([seen, *memory_text.peaks(result.memory)])
    also = f", {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    match result.verdict:
        case "clean":
            clean = "clean in shapes" if result.shapes_only else "clean"
            return paint(_GREEN, f"{clean}: {name} ran without a fault{also}") + f" ({facts})"
        case "fault":
            return paint(_RED, f"fault: {faults} in {name}{also}") + f" ({facts})"
    why = ": " + "; ".join(_in_one_line(note) for note in result.notes) if result.notes else ""
    return paint(_YELLOW, f"unproven: {name}{also}") + why + f" ({facts})"
