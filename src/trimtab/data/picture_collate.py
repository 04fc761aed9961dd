"""Rows with pictures as a batch of tensors, for any image-text-to-text model, through its own processor.

The processor is called once for the rows of a batch that have pictures, and once for those that have none; a picture is
prepared once. Labels are on the answers alone. Everything stays on the CPU: nothing here touches an accelerator, and a
collator can be sent to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from trimtab.data.clean import BadRow
from trimtab.data.picture_text import Written, text_of
from trimtab.data.picture_tokens import Tokens, moved, processed
from trimtab.data.render import IGNORED, label, opening_ids
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from trimtab.data.pictures import PictureRow

_LABELS = "labels"
Batch = dict[str, Any]


class TooLong(RequestError):
    """A row of which `max_length` would leave no answer, or a part of a picture."""


class PictureCollator:
    """Makes batches of rows with pictures. `max_length` cuts answers, never pictures."""

    def __init__(self, processor: Any, max_length: int | None = None) -> None:
        tokenizer = processor.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise RequestError.of(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets",
                "labels are placed by offsets; without them the loss could fall on the wrong tokens",
                "use a model with a tokenizer.json",
            )
        opening = opening_ids(tokenizer)
        if len(tokenizer("a")["input_ids"]) > len(opening) + len(
            tokenizer("a", add_special_tokens=False)["input_ids"]
        ):
            raise RequestError.of(
                f"the tokenizer {type(tokenizer).__name__} puts a token of its own behind every text",
                "a question would end before its answer; encoder-decoder models are not trained here",
                "set add_eos_token to false in the model's tokenizer_config.json, or choose a decoder",
            )
        self.processor = processor
        self.max_length = max_length
        self.text = text_of(processor)
        self._opening = "".join(tokenizer.convert_ids_to_tokens(opening))
        self._marks = [tokenizer.convert_tokens_to_ids(mark) for mark in self.text.marks]
        self._taken: dict[tuple[tuple[int, int], ...], int] = {}

    def __call__(self, rows: Sequence[PictureRow]) -> Batch:
        """Tensors to train on, padded on the right."""
        written = [self._written(row) for row in rows]
        tokens, batch = self._tokens(rows, written)
        for row, one, made in zip(rows, written, tokens, strict=True):
            made.beside[_LABELS] = self._labels(row, one, made)
            self._cut(row, made)
        return batch | self._padded(tokens, "right")

    def asked(self, rows: Sequence[PictureRow]) -> Batch:
        """Tensors to be answered: each row without its last answer, padded on the left."""
        tokens, batch = self._tokens(rows, [self._written(row, asked=True) for row in rows])
        return batch | self._padded(tokens, "left")

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer, as the rows teach it."""
        return list(self.processor.tokenizer.convert_tokens_to_ids(self.text.ends))

    def check(self, row: PictureRow) -> None:
        """Raise BadRow where the row cannot be written for this model; opens no picture."""
        self.text.written(row)

    def length(self, row: PictureRow, *, asked: bool = False) -> int:
        """How many tokens the row takes, or its last question with what stands before it.

        A picture of a size that was met before is not prepared again, nor opened where its size is known. A token
        more or less is possible where what stands for a picture touches the words beside it.
        """
        written = self._written(row, asked=asked)
        words = len(self.processor.tokenizer(written.text + (written.suffix or ""))["input_ids"])
        sizes = tuple(picture.size or picture.open().size for picture in row.pictures)
        if sizes not in self._taken:
            images = [picture.open() for picture in row.pictures]
            (made,), _ = processed(self.processor, [written], [images] if images else None, self._opening)
            self._taken[sizes] = len(made.offsets) - words
        return words + self._taken[sizes]

    def _written(self, row: PictureRow, *, asked: bool = False) -> Written:
        try:
            return self.text.asked(row) if asked else self.text.written(row)
        except BadRow as bad:
            raise _refused(row, str(bad)) from bad

    def _tokens(self, rows: Sequence[PictureRow], written: Sequence[Written]) -> tuple[list[Tokens], Batch]:
        """Every row's tokens, in order, and what belongs to the pictures of the batch."""
        made: dict[int, Tokens] = {}
        batch: Batch = {}
        for seen in (True, False):
            places = [place for place, row in enumerate(rows) if bool(row.pictures) is seen]
            if not places:
                continue
            images = [[picture.open() for picture in rows[place].pictures] for place in places]
            tokens, more = processed(
                self.processor, [written[place] for place in places], images if seen else None, self._opening
            )
            made |= zip(places, tokens, strict=True)
            batch |= more
        return [made[place] for place in range(len(rows))], batch

    def _labels(self, row: PictureRow, written: Written, made: Tokens) -> Tensor:
        import torch

        ids = made.beside["input_ids"]
        if written.apart:
            return torch.where(made.beside["token_type_ids"] == 1, ids, IGNORED)
        spans = moved(written.spans, written.text, made.text, self.text.marks)
        if spans is None:
            raise _refused(
                row, f"the processor {type(self.processor).__name__} changes the text beside its pictures"
            )
        return torch.tensor(label(ids.tolist(), made.offsets, spans))

    def _cut(self, row: PictureRow, made: Tokens) -> None:
        import torch

        most, ids = self.max_length, made.beside["input_ids"]
        if most is None or len(ids) <= most:
            return
        pictures = torch.isin(ids, torch.tensor(self._marks)).nonzero()
        if len(pictures) and int(pictures[-1]) >= most:
            raise _too_long(
                row, len(ids), most, "its pictures alone end behind that, and a picture is never cut"
            )
        for name, values in made.beside.items():
            made.beside[name] = values[:most]
        if (made.beside[_LABELS] == IGNORED).all():
            raise _too_long(row, len(ids), most, "nothing of its answer would be left to train on")

    def _padded(self, tokens: Sequence[Tokens], side: Literal["left", "right"]) -> Batch:
        import torch

        width = max(len(made.beside["input_ids"]) for made in tokens)
        filler = {"input_ids": self.processor.tokenizer.pad_token_id, _LABELS: IGNORED}
        batch: Batch = {}
        for name in dict.fromkeys(name for made in tokens for name in made.beside):
            values = torch.full((len(tokens), width), filler.get(name, 0))
            for row, made in zip(values, tokens, strict=True):
                held = made.beside.get(name, row[:0])
                (row[: len(held)] if side == "right" else row[width - len(held) :]).copy_(held)
            batch[name] = values
        return batch


def _refused(row: PictureRow, reason: str) -> RequestError:
    return RequestError.of(
        f"{row.where}: {reason}",
        "the loss would fall on the wrong tokens, or the model would learn from another conversation",
        "repair or remove the row (one question and one answer is what every template writes), or set "
        "model.chat_template",
    )


def _too_long(row: PictureRow, tokens: int, most: int, why: str) -> TooLong:
    return TooLong.of(
        f"{row.where}: {tokens:,} tokens, and data.max_length={most:,}",
        why,
        "raise data.max_length, remove the row, or let data.too_long=drop leave such rows out",
    )
