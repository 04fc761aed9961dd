"""Which rows with pictures fit a model, before anything is trained: written by its template, and within max_length.

How many tokens a picture takes is asked of the model's processor once for each size. Nothing is cut here: the collator
cuts, and what it could not cut is dropped now rather than met in the middle of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trimtab.data.clean import BadRow, Tally
from trimtab.data.picture_collate import PictureCollator, TooLong

if TYPE_CHECKING:
    from trimtab.data.pictures import PictureRow


_ABOUT = 2
"""Tokens by which a length may be off; what is nearer to the limit is tried."""


class Fits:
    """Whether a row can be trained on by this collator; what cannot is counted by its reason."""

    def __init__(self, collator: PictureCollator, too_long: Literal["truncate", "drop"]) -> None:
        self.collator = collator
        self.too_long = too_long

    def __call__(self, row: PictureRow, tally: Tally) -> bool:
        try:
            self.collator.check(row)
        except BadRow as bad:
            tally.bad(str(bad), row.where)
            return False
        most = self.collator.max_length
        if most is None or self.collator.length(row) <= most:
            return True
        if self.too_long == "drop":
            tally.drop(f"longer than data.max_length={most} (data.too_long=drop)", row.where)
            return False
        if not self._answered(row, most):
            tally.drop(f"no answer left at data.max_length={most}: a picture is never cut", row.where)
            return False
        tally.change(f"answer cut at data.max_length={most}")
        return True

    def _answered(self, row: PictureRow, most: int) -> bool:
        """Whether all pictures and some of an answer are left at `most` tokens."""
        answers = sum(message["role"] == "assistant" for message in row.messages)
        if answers == 1 and self.collator.length(row, asked=True) > most + _ABOUT:
            return False
        try:
            self.collator([row])
        except TooLong:
            return False
        return True
