"""Rows to be spoken as a batch of tensors for a model of the Higgs Audio family, with labels.

Trained are the codes of the clip, the first EOS of each of its codebooks, and the tokens of the text behind it. The
reference, all that a generation prompt holds, fills and padding are not. A clip is never cut: it would lose its end.
Everything stays on the CPU: nothing here touches an accelerator, and a collator can be sent to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trimtab.config.schema import VoiceSettings
from trimtab.data.clean import BadRow
from trimtab.data.delay import delayed, delayed_labels
from trimtab.data.render import IGNORED
from trimtab.data.voice_marks import VoiceMarks
from trimtab.data.voice_turns import VoiceTurns
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from trimtab.config.schema import DataSettings
    from trimtab.data.report import VoiceReport
    from trimtab.data.voice_rows import VoiceRow

Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class CodedRow:
    """A row with its clips as codes, (frames, codebooks)."""

    row: VoiceRow
    reference: Tensor | None
    target: Tensor | None


class Made(NamedTuple):
    """One row, without padding: tokens with their labels, columns of codes with theirs."""

    ids: list[int]
    labels: list[int]
    columns: Tensor
    column_labels: Tensor


class VoiceCollator:
    """Makes batches of coded rows. One over `max_length` tokens, or over what the model has places for, is refused."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_config: Any,
        voice: VoiceSettings,
        max_length: int | None = None,
    ) -> None:
        self.marks = VoiceMarks.of(tokenizer, model_config)
        self.turns = VoiceTurns(tokenizer, self.marks, voice)
        self.max_length = max_length
        self.places: int | None = getattr(model_config, "max_position_embeddings", None)
        assert tokenizer.pad_token_id is not None
        self._pad = int(tokenizer.pad_token_id)

    def __call__(self, rows: Sequence[CodedRow]) -> Batch:
        """Tensors to train on, padded on the right."""
        made = [self._trained(row) for row in rows]
        for row, one in zip(rows, made, strict=True):
            if self.most is not None and len(one.ids) > self.most:
                raise too_long(row, len(one.ids), self.limit())
        labels = self._padded([one.labels for one in made], IGNORED, "right")
        audio_labels = _stacked([one.column_labels for one in made], IGNORED)
        return self._batch(made, "right") | {"labels": labels, "audio_labels": audio_labels}

    def asked(self, rows: Sequence[CodedRow]) -> Batch:
        """Tensors to be spoken: rows up to where the clip would start, text padded on the left, codes on the right.

        Without any reference in the batch there are no codes in it, as `generate` wants it.
        """
        batch = self._batch([self._prompt(row) for row in rows], "left")
        if not batch["audio_input_ids_mask"].any():
            del batch["audio_input_ids"], batch["audio_input_ids_mask"]
        return batch

    def made(self, row: CodedRow) -> Made:
        """The row as it is trained on; BadRow where it cannot be, whatever its length."""
        import torch

        if row.target is None:
            raise BadRow("there is no clip to train on")
        for name, codes in (("reference", row.reference), ("clip", row.target)):
            if codes is not None and not len(codes):
                raise BadRow(f"its {name} has no frame")
        ids = self.turns.ids(row.row, row.reference is not None)
        trained = self.turns.trained(ids)
        if not trained:
            raise BadRow("the chat template writes no token behind its clip: no end of it would be trained")
        before = self._reference(row)
        made = self._expanded(ids, [*before, self._columns(row, "clip", row.target)], trained)
        ignored = [torch.full_like(columns, IGNORED) for columns in before]
        labels = torch.cat([*ignored, delayed_labels(row.target, self.marks.stream_eos)])
        return made._replace(column_labels=labels)

    def length(self, row: CodedRow, *, asked: bool = False) -> int:
        """How many tokens the row takes, or what is asked of it: its clips are a token for each column."""
        return len((self._prompt(row) if asked else self._trained(row)).ids)

    @property
    def most(self) -> int | None:
        """How many tokens a row may have."""
        limits = [limit for limit in (self.max_length, self.places) if limit is not None]
        return min(limits, default=None)

    def limit(self) -> str:
        """What sets it, in words."""
        if self.max_length is not None and self.most == self.max_length:
            return f"data.max_length={self.max_length:,}"
        return f"the model's max_position_embeddings={self.places:,}"

    def fitting(
        self, train: Sequence[CodedRow], held: Sequence[CodedRow], data: DataSettings, report: VoiceReport
    ) -> tuple[list[CodedRow], list[CodedRow]]:
        """The rows that can be trained on and evaluated by; the others are counted in the report, or stop the run."""
        from trimtab.data.voice_fit import fitting

        return fitting(self, train, held, data, report)

    def _trained(self, row: CodedRow) -> Made:
        try:
            return self.made(row)
        except BadRow as bad:
            raise _refused(row, str(bad)) from bad

    def _prompt(self, row: CodedRow) -> Made:
        try:
            ids = self.turns.ids(row.row, row.reference is not None)
        except BadRow as bad:
            raise _refused(row, str(bad)) from bad
        end = len(ids) - 1 - ids[::-1].index(self.marks.audio.id)
        return self._expanded(ids[:end], self._reference(row), range(0))

    def _reference(self, row: CodedRow) -> list[Tensor]:
        return [] if row.reference is None else [self._columns(row, "reference", row.reference)]

    def _columns(self, row: CodedRow, name: str, codes: Tensor) -> Tensor:
        where = f"{row.row.where}, its {name}"
        if codes.dim() == 2 and codes.shape[1] != self.marks.codebooks:
            raise RequestError.of(
                f"{where}: codes of {codes.shape[1]} codebooks, and the model has {self.marks.codebooks}",
                "the codec and the model do not belong together",
                "set voice.codec to the codec that the model was made for",
            )
        return delayed(codes, self.marks.stream_bos, self.marks.stream_eos, where)

    def _expanded(self, ids: Sequence[int], clips: Sequence[Tensor], trained: range) -> Made:
        """The tokens with each clip's audio token widened to its columns; labels on the `trained` places alone."""
        import torch

        waiting = iter(clips)
        wide: list[int] = []
        labels: list[int] = []
        for place, token in enumerate(ids):
            some = self.marks.placeholders(len(next(waiting))) if token == self.marks.audio.id else [token]
            wide += some
            labels += [token] if place in trained else [IGNORED] * len(some)
        columns = torch.cat(list(clips)) if clips else torch.empty(0, self.marks.codebooks, dtype=torch.long)
        return Made(wide, labels, columns, columns)

    def _batch(self, made: Sequence[Made], side: Literal["left", "right"]) -> Batch:
        import torch

        lengths = torch.tensor([len(one.columns) for one in made])
        return {
            "input_ids": self._padded([one.ids for one in made], self._pad, side),
            "attention_mask": self._padded([[1] * len(one.ids) for one in made], 0, side),
            "audio_input_ids": _stacked([one.columns for one in made], self.marks.stream_eos),
            "audio_input_ids_mask": torch.arange(int(lengths.max()))[None, :] < lengths[:, None],
        }

    def _padded(self, rows: Sequence[list[int]], filler: int, side: Literal["left", "right"]) -> Tensor:
        import torch

        width = max(map(len, rows))
        fill = [[filler] * (width - len(row)) for row in rows]
        return torch.tensor(
            [row + more if side == "right" else more + row for row, more in zip(rows, fill, strict=True)]
        )


def _stacked(clips: Sequence[Tensor], filler: int) -> Tensor:
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(clips), batch_first=True, padding_value=filler)


def too_long(row: CodedRow, tokens: int, limit: str) -> RequestError:
    return RequestError.of(
        f"{row.row.where}: {tokens:,} tokens, and {limit}",
        "a clip is never cut: without its end the model would not learn to stop",
        "raise data.max_length as far as the model has places, shorten the clips, or let data.too_long=drop leave "
        "such rows out",
    )


def _refused(row: CodedRow, reason: str) -> RequestError:
    return RequestError.of(
        f"{row.row.where}: {reason}",
        "the loss would fall on nothing, or on what nobody said",
        "repair or remove the row",
    )
