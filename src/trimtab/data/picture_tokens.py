"""What a model's processor makes of texts and pictures, taken apart by row: tokens, and the characters of each.

While the processor runs, its tokenizer is listened to. So the text is known as the tokenizer gets it, each picture's
mark widened to what the model makes of the picture, with no knowledge of how any family does that.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.data.picture_text import Written
from trimtab.data.render import Span

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """One row's tokens, without padding."""

    beside: dict[str, Tensor]
    """`input_ids`, and whatever has one value for each of them."""
    text: str
    """As the tokenizer was given it."""
    offsets: list[Span]
    """Which characters of it each token stands for."""


def processed(
    processor: Any, written: Sequence[Written], images: list[list[Any]] | None, opening: str
) -> tuple[list[Tokens], dict[str, Any]]:
    """Each row's tokens, and what belongs to the pictures of all of them. `opening` is the text that the tokenizer
    puts before others by itself; it is not put before one that has it."""
    listener = _Listener(processor.tokenizer, opening)
    texts = [one.text for one in written]
    options: dict[str, Any] = {"return_tensors": "pt", "padding": True}
    suffixes = [one.suffix for one in written if one.suffix is not None]
    if images is None and written[0].apart:
        ends = [suffix + listener.eos_token for suffix in suffixes]
        opened = [f"{listener.bos_token}{text}\n" for text in texts]
        made = dict(listener(opened, ends or None, return_token_type_ids=True, **options))
    else:
        # A copy, so that nobody else meets the listener.
        processor = copy.copy(processor)
        processor.tokenizer = listener
        options |= {} if images is None else {"images": images}
        options |= {"suffix": suffixes} if suffixes else {}
        made = dict(processor(text=texts, **options))
    ids, mask = made["input_ids"], made["attention_mask"].bool()
    beside = [
        name
        for name, value in made.items()
        if (name in listener.names or name.endswith("token_type_ids")) and value.shape == ids.shape
    ]
    tokens = [
        Tokens({name: made[name][row][kept] for name in beside}, text, [offsets[i] for i in _places(kept)])
        for row, (kept, text, offsets) in enumerate(zip(mask, listener.texts, listener.offsets, strict=True))
    ]
    # Some processors make labels of their own.
    return tokens, {name: value for name, value in made.items() if name not in (*beside, "labels")}


def moved(spans: Sequence[Span], text: str, widened: str, marks: Sequence[str]) -> list[Span] | None:
    """Where spans of a text are once each mark in it has been widened; None where that is not plain to see.

    The pieces between the marks stay as they are, in their order. Each is looked for from the left and from the right,
    and one that holds a span must be found in one place.
    """
    between = _between(text, marks)
    pieces = [text[start:end] for start, end in between]
    first = _leftmost(pieces, widened)
    mirrored = _leftmost([piece[::-1] for piece in reversed(pieces)], widened[::-1])
    if first is None or mirrored is None:
        return None
    last = [len(widened) - at - len(piece) for at, piece in zip(reversed(mirrored), pieces, strict=True)]
    found = []
    for start, end in spans:
        number = next(n for n, piece in enumerate(between) if piece[0] <= start and end <= piece[1])
        if first[number] != last[number]:
            return None
        shift = first[number] - between[number][0]
        found.append((start + shift, end + shift))
    return found


def _leftmost(pieces: Sequence[str], text: str) -> list[int] | None:
    """Where each piece first is behind the one before it; the first piece opens the text and the last one ends it."""
    places: list[int] = []
    reached = 0
    for piece in pieces:
        last = len(places) == len(pieces) - 1
        place = len(text) - len(piece) if last else text.find(piece, reached) if places else 0
        if place < reached or not text.startswith(piece, place):
            return None
        places.append(place)
        reached = place + len(piece)
    return places


def _between(text: str, marks: Sequence[str]) -> list[Span]:
    found = list(re.finditer("|".join(map(re.escape, marks)), text))
    starts = [0, *(mark.end() for mark in found)]
    return list(zip(starts, [*(mark.start() for mark in found), len(text)], strict=True))


def _places(kept: Tensor) -> list[int]:
    return [int(place) for place in kept.nonzero().flatten()]


class _Listener:
    """Stands in a tokenizer's place for one call, and keeps what it was asked and which characters its tokens are."""

    def __init__(self, tokenizer: Any, opening: str) -> None:
        self._tokenizer = tokenizer
        self._opening = opening
        self.texts: list[str] = []
        self.offsets: list[list[Span]] = []
        self.names: list[str] = []

    def __call__(self, text: Any = None, text_pair: Any = None, **options: Any) -> Any:
        self.texts = [text] if isinstance(text, str) else list(text)
        options |= {
            "add_special_tokens": bool(self._opening) and not self.texts[0].startswith(self._opening),
            "padding_side": "right",
            "return_offsets_mapping": True,
            "return_attention_mask": True,
            "truncation": False,
        }
        made = self._tokenizer(self.texts, text_pair, **options)
        offsets = made.data.pop("offset_mapping")
        self.offsets = offsets.tolist() if hasattr(offsets, "tolist") else offsets
        self.names = list(made)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
