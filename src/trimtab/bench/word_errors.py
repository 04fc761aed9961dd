"""How many words of a clip a recogniser hears wrong: PocketSphinx, whose model comes with it, and our own count.

A figure of intelligibility, to be held against that of a true clip: no recogniser hears everything. Needs the extra
`judge`; nothing is fetched, nothing is trained, and each clip is heard as if it were the first.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RATE = 16_000
"""Samples a second of the recogniser's model."""
_SMALL = (
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LARGE = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_LONGEST = 12
"""Digits of a number that is spelled; a longer one is read digit by digit, as a telephone number is."""


class WordErrors(NamedTuple):
    """How far what was heard is from what was meant, of one clip or of many together."""

    edits: int
    """Words put in, left out or put in another's place, the fewest that make one of the other."""
    words: int
    """Words that were meant."""

    @property
    def rate(self) -> float | None:
        """Edits a word; over 1 where more is heard than was said; None where no word was meant."""
        return self.edits / self.words if self.words else None


def word_errors(meant: str, heard: str) -> WordErrors:
    """The count of one clip."""
    wanted = words_of(meant)
    return WordErrors(edits_between(words_of(heard), wanted), len(wanted))


def total(counts: Iterable[WordErrors]) -> WordErrors:
    """The count of a set: all edits over all words, so that a long clip weighs more than a short one."""
    listed = list(counts)
    return WordErrors(sum(count.edits for count in listed), sum(count.words for count in listed))


def words_of(text: str) -> list[str]:
    """The words as a recogniser would write them: small letters, no punctuation, numbers in words."""
    plain = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain)
    spelled = re.sub(r"\d+", lambda number: f" {_in_words(number[0])} ", plain)
    # An apostrophe belongs to its word (don't); one that only opens or closes a quotation does not.
    return [word for word in (part.strip("'") for part in re.findall(r"[\w']+", spelled)) if word.strip("_")]


def edits_between(one: Sequence[str], other: Sequence[str]) -> int:
    """The edit distance between two lists of words."""
    row = list(range(len(other) + 1))
    for place, word in enumerate(one, 1):
        diagonal, row[0] = row[0], place
        for column, against in enumerate(other, 1):
            diagonal, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, diagonal + (word != against)),
            )
    return row[-1]


def _in_words(digits: str) -> str:
    if len(digits) > _LONGEST or (len(digits) > 1 and digits[0] == "0"):
        return " ".join(_SMALL[int(digit)] for digit in digits)
    return _spelled(int(digits))


def _spelled(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens] + (f" {_SMALL[rest]}" if rest else "")
    size, name = next(one for one in _LARGE if number >= one[0])
    count, rest = divmod(number, size)
    return f"{_spelled(count)} {name}" + (f" {_spelled(rest)}" if rest else "")


class Recogniser:
    """PocketSphinx with its own model of American English."""

    def __init__(self) -> None:
        """RequestError where it is not installed."""
        try:
            from pocketsphinx import Decoder
        except (ImportError, OSError) as error:
            raise RequestError.of(
                f"word error rates need pocketsphinx, and it cannot be imported ({error})",
                "it is the recogniser that listens to the clips",
                "pip install 'trimtab[judge]'",
            ) from None
        self._decoder: Any = Decoder

    def hear(self, samples: NDArray[np.float32], rate: int) -> str:
        """What it understands, in small letters; empty where it understands nothing."""
        import numpy as np

        from trimtab.data.sound import resample

        sound = resample(samples, rate, RATE)
        if not np.any(sound):
            return ""  # in perfect silence it hears a word
        pcm = np.round(np.clip(sound, -1.0, 1.0) * 32767).astype("<i2").tobytes()
        # A decoder for each clip: one that has listened before keeps means and noise levels of what it heard.
        decoder = self._decoder(samprate=RATE, loglevel="FATAL")
        decoder.start_utt()
        decoder.process_raw(pcm, full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return "" if found is None else str(found.hypstr)
