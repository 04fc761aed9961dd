"""The wording in which VQA's metric compares answers: no articles or punctuation, numbers as digits, apostrophes back.

Follows the rules of the data set's own evaluation, with its odd ones: a comma between digits makes all punctuation
vanish instead of leaving a space. Used by `picture_metrics.py` alone.
"""

from __future__ import annotations

import re

_NUMBERS = "zero one two three four five six seven eight nine ten"
_DIGITS = {"none": "0"} | {word: str(value) for value, word in enumerate(_NUMBERS.split())}
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")

_CONTRACTIONS = """\
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's i'd've i'm i've isn't it'd it'd've it'll let's ma'am mightn't mightn't've might've mustn't must've
needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _without_one(word: str) -> list[str]:
    """The word as people write it in haste: with one of its apostrophes left out."""
    return [word[:place] + word[place + 1 :] for place, letter in enumerate(word) if letter == "'"]


_APOSTROPHES = {hasty: word for word in _CONTRACTIONS.split() for hasty in _without_one(word)}


def vqa_words(text: str) -> str:
    """An answer as VQA's metric compares it."""
    text = " ".join(text.split())
    in_number = _COMMA_IN_NUMBER.search(text) is not None
    out = text
    for mark in _PUNCTUATION:
        gone = in_number or f"{mark} " in text or f" {mark}" in text
        out = out.replace(mark, "" if gone else " ")
    out = _PERIOD.sub("", out)
    words = (_DIGITS.get(word, word) for word in out.lower().split())
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)
