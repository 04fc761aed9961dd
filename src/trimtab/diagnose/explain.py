"""From a pasted traceback or log to cause and fix. Runs nothing, opens nothing, imports no torch.

Every known text found is explained once, the most specific reading of it; what is only a consequence of another fault
(a time-out on the ranks that waited) comes last.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.diagnose.finding import Place
from trimtab.diagnose.logtext import Flat, clean_lines, flatten, last_exception, thin, user_frame
from trimtab.diagnose.pattern import DEVICE, Pattern
from trimtab.diagnose.patterns import PATTERNS

_QUOTE_LIMIT = 300


@dataclass(frozen=True)
class Explanation:
    """What a piece of a log means."""

    kind: str
    quote: str
    """The text that was recognised."""
    line_number: int
    """Where it stands in the log, from 1."""
    cause: str
    fix: str
    where: Place | None = None
    """The user's own frame of the traceback, if there is one."""
    pattern: str = ""
    """The name of the entry in the table of known texts."""
    consequence: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As `trimtab explain --json` prints it."""
        return asdict(self)


def explain(text: str) -> list[Explanation]:
    """All that is known about a log; empty when nothing in it is known."""
    lines = clean_lines(text)
    # Wrapped prose is joined by blanks; text that a terminal cut at its width, inside words too, by nothing.
    shorter = thin(lines)
    readings = (flatten(shorter, " "), flatten(shorter, ""))
    found: list[Explanation] = []
    taken: list[tuple[int, int, str]] = []
    for pattern in PATTERNS:
        for flat in readings:
            for match in _free_matches(pattern, flat, taken):
                first, last = flat.line_number(match.start()), flat.line_number(match.end() - 1)
                found.append(_explanation(pattern, match, first, user_frame(lines, last)))
    if not any(e.kind in ("device-mismatch", "index-device") for e in found):
        found += _conflicting_devices(lines)
    return _once(sorted(found, key=lambda e: (e.consequence, e.line_number)))


def last_error(text: str) -> tuple[str, Place | None] | None:
    """The last exception line of a log and the user's frame that led to it, for a text that is not known."""
    lines = clean_lines(text)
    if (last := last_exception(lines)) is None:
        return None
    number, line = last
    return line, user_frame(lines, number)


def match_message(message: str, context: str = "") -> tuple[Pattern, dict[str, str]] | None:
    """The entry that knows an exception's text (`context`: the traceback, for entries that look at it)."""
    flat = " ".join(message.split())
    for pattern in PATTERNS:
        if pattern.condition is not None and not pattern.condition.search(context or flat):
            continue
        if match := pattern.regex.search(flat):
            return pattern, _fields(match)
    return None


def _free_matches(pattern: Pattern, flat: Flat, taken: list[tuple[int, int, str]]) -> list[re.Match[str]]:
    """The places where a pattern matches and no more specific one did; they are taken from now on."""
    if pattern.condition is not None and not pattern.condition.search(flat.text):
        return []
    matches = []
    for match in pattern.regex.finditer(flat.text):
        start, end = flat.position(match.start()), flat.position(match.end() - 1) + 1
        if not any(start < other_end and other_start < end for other_start, other_end, _ in taken):
            matches.append(match)
        elif not all(name == pattern.name for s, e, name in taken if start < e and s < end):
            continue
        taken.append((start, end, pattern.name))
    return matches


def _fields(match: re.Match[str]) -> dict[str, str]:
    devices = list(dict.fromkeys(re.findall(rf"\b{DEVICE}", match.group(0).replace("device", ""))))
    fields = {"a": "one device", "b": "another"}
    if len(devices) >= 2:
        fields = {"a": devices[0], "b": devices[1]}
    return fields | {name: " ".join((value or "?").split()) for name, value in match.groupdict().items()}


def _explanation(pattern: Pattern, match: re.Match[str], number: int, where: Place | None) -> Explanation:
    quote = " ".join(match.group(0).split())
    if len(quote) > _QUOTE_LIMIT:
        quote = quote[: _QUOTE_LIMIT - 1] + "…"
    fields = _fields(match)
    return Explanation(
        kind=pattern.kind,
        quote=quote,
        line_number=number,
        cause=pattern.cause.format_map(fields),
        fix=pattern.fix.format_map(fields),
        where=where,
        pattern=pattern.name,
        consequence=pattern.consequence,
    )


_LOADED = re.compile(
    rf"(?:model|模型)[^\n]{{0,40}}?(?:loaded|placed|moved|device|加载|位于|移动)[^\n]{{0,20}}?(?:on|to|in|[:=]|到|在|于)\s*[\"'`]?"
    rf"(?P<device>{DEVICE})\b",
    re.IGNORECASE,
)
_DEVICE_LINE = re.compile(
    r"(?:^|[\s\-*\[(])(?:(?:training|train|config(?:ured)?|target|using|训练|使用|目标)[ "
    rf"_.]?)?(?:device|设备)\s*[:=]+\s*[\"'`]?(?P<device>{DEVICE})\b",
    re.IGNORECASE,
)


def _conflicting_devices(lines: list[str]) -> list[Explanation]:
    """A log that names one device for the model and another for the run: no error, and nothing fits together."""
    model: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, 1):
        if match := _LOADED.search(line):
            model = (number, match["device"], match.group(0).strip())
        elif (
            (match := _DEVICE_LINE.search(line))
            and model
            and model[1].split(":")[0] != match["device"].split(":")[0]
        ):
            cause = (
                f"the model was put on {model[1]} while the rest of the run uses {match['device']}: one part "
                "detects the device for itself and ignores the configured one. Mixed devices raise an error; "
                "a run that is silent instead is slow (the first step on a CPU can take minutes)"
            )
            fix = (
                "decide the device once and read it everywhere: self.device = config.device (here "
                f"{match['device']}) in place of auto-detection, also for TrainingArguments (use_cpu=True "
                "for the CPU); announce and time the first step"
            )
            quote = f"{model[2]} … {match.group(0).strip(' -*')}"
            return [
                Explanation("placement-conflict", quote, model[0], cause, fix, None, "conflicting-devices")
            ]
    return []


def _once(explanations: list[Explanation]) -> list[Explanation]:
    """The same cause once, however often and with whatever devices the log tells it."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for explanation in explanations:
        key = (explanation.pattern, re.sub(rf"\b{DEVICE}|one device|another", "", explanation.cause))
        if key not in seen:
            seen.add(key)
            kept.append(explanation)
    return kept
