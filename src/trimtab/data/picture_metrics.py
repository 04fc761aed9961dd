"""How an answer about a picture is scored, by the definitions of the data sets: 0 to 1 for one answer, text only.

`exact`: the same but for case, spaces and a full stop at the end. `relaxed`: ChartQA's, numbers within 5 %. `anls`:
DocVQA's and InfoVQA's, from the edit distance. `soft`: VQAv2's and TextVQA's, by how many of ten people said so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from trimtab.data.picture_wording import vqa_words
from trimtab.errors import RequestError

TOLERANCE = 0.05
"""How far a number may be off, as a share of the right one (ChartQA, section 5.1)."""

TAU = 0.5
"""From this share of wrong characters on, an answer is worth nothing (DocVQA)."""


def score(metric: str, given: str, answers: Sequence[str]) -> float:
    """What a given answer is worth, 0 to 1, where `answers` are accepted."""
    if metric not in METRICS:
        raise RequestError.of(
            f"no metric is called {metric!r}", f"the metrics are {', '.join(METRICS)}", "name one of them"
        )
    assert answers, "rows without an answer are bad rows"
    return METRICS[metric](given, answers)


def exact(given: str, answers: Sequence[str]) -> float:
    """Whether it is one of the answers, but for case, spaces and a full stop at the end."""
    return float(_plain(given) in map(_plain, answers))


def relaxed(given: str, answers: Sequence[str]) -> float:
    """ChartQA's relaxed accuracy: a number within 5 % of the right one; anything else must be the same text.

    As the usual script has it, `12%` is 0.12 and a year is a number like any other. Beyond it, thousands' commas and
    a currency sign do not hide a number, and where the right answer is 0 any way to write 0 is right.
    """
    return float(any(_relaxed(given, answer) for answer in answers))


def anls(given: str, answers: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity: 1 - distance / length to the nearest answer, 0 where half is wrong."""
    return max(_similarity(_spaced(given), _spaced(answer)) for answer in answers)


def soft(given: str, answers: Sequence[str]) -> float:
    """VQA accuracy: each answer is left out in turn, min(1, how many of the others say the same / 3), averaged.

    Both sides are worded alike first (punctuation, articles, number words, contractions). A single answer, as in data
    of one's own, has no others to leave it out of, and is compared by itself.
    """
    said, people = vqa_words(given), [vqa_words(answer) for answer in answers]
    if len(people) == 1:
        return float(said == people[0])
    same = sum(said == person for person in people)
    return math.fsum(min(1.0, (same - (said == person)) / 3) for person in people) / len(people)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact": exact,
    "relaxed": relaxed,
    "anls": anls,
    "soft": soft,
}


def _spaced(text: str) -> str:
    return " ".join(text.lower().split())


def _plain(text: str) -> str:
    return _spaced(text).removesuffix(".").rstrip()


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(\D|$))")
_CURRENCY = re.compile(r"^([-+]?)\s*(?:us\$|[$€£¥₹])\s*|\s*[€£¥₹$]$")


def _number(text: str) -> float | None:
    text = _THOUSANDS.sub("", _CURRENCY.sub(r"\1", _plain(text)))
    share = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text) / (100 if share else 1)
    return number if math.isfinite(number) else None


def _relaxed(given: str, answer: str) -> bool:
    ours, right = _number(given), _number(answer)
    if ours is None or right is None:
        return _plain(given) == _plain(answer)
    if right == 0:
        return ours == 0
    # In floating point 105 / 100 - 1 is a little over 0.05.
    return abs(ours - right) / abs(right) <= TOLERANCE + 1e-9


def _similarity(given: str, answer: str) -> float:
    longest = max(len(given), len(answer))
    if longest == 0:
        return 1.0
    distance = _edits(given, answer) / longest
    return 1 - distance if distance < TAU else 0.0


def _edits(one: str, other: str) -> int:
    """Levenshtein's distance."""
    before = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        now = [row]
        for column, right in enumerate(other, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (left != right)))
        before = now
    return before[-1]
