"""Reads pasted logs: strips colours and prefixes, undoes line wrapping, finds tracebacks and the user's frame.

Pure text: nothing is opened, nothing is executed.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.diagnose.finding import Place

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,64}[A-Za-z]|\x1b\][^\x07]{0,4096}\x07|\r(?!\n)")
# A pattern that begins with a word tries each of its letters: words without end would take time without end.
_LONG_WORD = re.compile(r"(\w{300})\w+")
_LONGEST_LINE = 20_000
_WIDE = str.maketrans("：，！（）；‘’“”。＝", ":,!();''\"\".=")
# [rank0]:   [1,0]<stderr>:   (worker pid=12)   0:   rank 1 |
_PREFIX = re.compile(
    r"^\s*(?:\[?rank ?\d+\]?\s*[:|]|\[\d+,\d+\]<std(?:err|out)>:|\([\w"
    r" .]*pid=\d+[^)]*\)|\[default\d+\]:|[|>] )\s?",
    re.IGNORECASE,
)
_BOX = re.compile(r"^[\s╭╰│─┃┏┗]*|[\s│╮╯─┃┓┛]*$")
_LIBRARY = re.compile(
    r"site-packages|dist-packages|[/\\]lib[/\\]python\d|[/\\]torch[/\\]|[/\\]Lib[/\\]|^<frozen|^<string>|"
    r"[/\\](?:transformers|trl|peft|accelerate|datasets)[/\\]",
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_FRAME_IPYTHON = re.compile(
    r"^(?:File\s+(?P<file>[^\s:][^:\n]*?):(?P<line>\d+)|(?P<cell>(?:Cell )?In ?\[\d+\]), line (?P<cline>\d+))"
)
_FRAME_RICH = re.compile(r"^(?P<file>[/\w.~-][^\s:]*\.py):(?P<line>\d+) in \S+$")
_EXCEPTION = re.compile(
    r"^(?:[\w.]+\.)?(?P<type>[A-Z]\w*(?:Error|Exception|Interrupt|Warning|Exit|Failure))\b:? ?(?P<text>.*)$"
)


_FIGURES = re.compile(r"\d[\d.,:e+-]*|[█▏▎▍▌▋▊▉#=>-]{2,}")
_LONG = 1000
_OCCURRENCES = 8


@dataclass(frozen=True)
class Flat:
    """A log as one line, with the way back to its line numbers."""

    text: str
    starts: tuple[int, ...]
    joint: int

    def line_number(self, offset: int) -> int:
        """The 1-based line of the log that holds this offset."""
        return max(bisect.bisect_right(self.starts, offset), 1)

    def position(self, offset: int) -> int:
        """The offset without the joints: the same for both ways of joining."""
        return offset - self.joint * max(bisect.bisect_right(self.starts, offset) - 1, 0)


def clean_lines(text: str) -> list[str]:
    """The log's lines without colours, rank prefixes and box drawing; full-width punctuation made plain."""
    lines = []
    for line in _ANSI.sub("", text).translate(_WIDE).splitlines():
        if len(line) > _LONGEST_LINE:
            line = f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 2 :]}"
        line = _LONG_WORD.sub(r"\1…", line)
        while (shorter := _PREFIX.sub("", line)) != line:
            line = shorter
        lines.append(_BOX.sub("", line) if re.match(r"\s*[╭╰│┃┏┗]", line) else line.rstrip())
    return lines


def thin(lines: list[str]) -> list[str]:
    """A long log with lines of one shape (a step's figures, a progress bar) blanked after their first occurrences."""
    if len(lines) <= _LONG:
        return lines
    seen: Counter[str] = Counter()
    kept = []
    for line in lines:
        shape = _FIGURES.sub("#", line)
        seen[shape] += 1
        kept.append(line if seen[shape] <= _OCCURRENCES else "")
    return kept


def flatten(lines: list[str], joint: str) -> Flat:
    """All lines as one; `joint` is a blank for wrapped prose, nothing for text cut at a fixed width."""
    parts: list[str] = []
    starts: list[int] = []
    offset = 0
    for line in lines:
        stripped = line.strip()
        if not stripped and parts and parts[-1].strip(" "):
            # An empty line ends a message: nothing may match across it.
            stripped = "\n\n"
        starts.append(offset)
        parts.append(stripped + joint)
        offset += len(stripped) + len(joint)
    return Flat("".join(parts), tuple(starts), len(joint))


def is_library(file: str) -> bool:
    """Whether a traceback's file belongs to Python or an installed library."""
    return bool(_LIBRARY.search(file))


def frames(lines: list[str]) -> Iterator[tuple[int, Place]]:
    """Every traceback frame of the log with the 1-based line number where it stands."""
    for index, line in enumerate(lines):
        stripped = line.strip()
        if match := _FRAME.search(stripped):
            yield index + 1, Place(match["file"], int(match["line"]), _code_after(lines, index))
        elif match := _FRAME_IPYTHON.match(stripped):
            file = (match["file"] or match["cell"]).strip()
            number = int(match["line"] or match["cline"])
            yield index + 1, Place(file, number, _arrow_after(lines, index, number))
        elif match := _FRAME_RICH.match(stripped):
            number = int(match["line"])
            yield index + 1, Place(match["file"], number, _arrow_after(lines, index, number))


def user_frame(lines: list[str], line_number: int, reach: int = 400) -> Place | None:
    """The user's own frame nearest before a line of the log: where the error came from."""
    before = lines[max(line_number - reach, 0) : line_number]
    own = [place for _, place in frames(before) if not is_library(place.file)]
    return own[-1] if own else None


def last_exception(lines: list[str]) -> tuple[int, str] | None:
    """The last exception line of the log, with its 1-based number."""
    for index in range(len(lines) - 1, -1, -1):
        stripped = lines[index].strip()
        if _EXCEPTION.match(stripped) and "Warning" not in stripped.split(":")[0]:
            return index + 1, stripped
    return None


def _code_after(lines: list[str], index: int) -> str:
    if index + 1 >= len(lines):
        return ""
    code = lines[index + 1].strip()
    return "" if _FRAME.search(code) or _EXCEPTION.match(code) else code


def _arrow_after(lines: list[str], index: int, number: int) -> str:
    for line in lines[index + 1 : index + 15]:
        if match := re.match(rf"^\s*(?:-+>|❱)\s*{number}\b\s?(?P<code>.*)$", line):
            return match["code"].strip()
    return ""
