"""What was done to the data, for people (`lines`) and for JSON (`as_dict`). Only keeps and prints numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.errors import some_of


@dataclass(frozen=True)
class Lengths:
    """Token counts of the rows as they are, before anything is cut."""

    min: int
    median: int
    p95: int
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        ordered = sorted(lengths)
        last = len(ordered) - 1
        return cls(ordered[0], ordered[last // 2], ordered[round(last * 0.95)], ordered[-1])

    def line(self, of: str) -> str:
        return f"  tokens a {of}: {self.min} to {self.max}, median {self.median}, 95 % up to {self.p95}"


def _dropped(dropped: Mapping[str, int], first: Mapping[str, str]) -> list[str]:
    """One line per reason, with the first row that it met."""
    return [f"    dropped {number:,}: {why} (first: {first[why]})" for why, number in dropped.items()]


@dataclass
class AskedReport:
    """Rows that are put to the model as questions or prompts: what was read, how it is asked, what became of it."""

    source: str
    asked: str
    rows_train: int
    rows_eval: int
    split: str
    dropped: dict[str, int]
    first_dropped: dict[str, str]
    notes: list[str] = field(default_factory=list)
    columns: list[str] | None = None
    """Columns that rewards get; None where there are no rewards."""
    tokens: Lengths | None = None
    chat: bool | None = None
    """Whether prompts go through the chat template, rather than being continued as they stand."""

    def lines(self) -> list[str]:
        lines = [f"data: {self.source}", f"  asked as: {self.asked}"]
        if self.columns is not None:
            lines.append(f"  columns for rewards: {', '.join(self.columns) or 'none'}")
        lines += _dropped(self.dropped, self.first_dropped)
        if self.tokens is not None:
            lines.append(self.tokens.line("prompt"))
        lines.append(_split(self.rows_train, self.rows_eval, self.split))
        return lines + [f"note: {note}" for note in self.notes]

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def _split(train: int, held: int, how: str) -> str:
    return f"split: {train:,} rows to train on, {held:,} held out ({how})"


@dataclass
class SourceReport:
    """One source: where its rows came from, what they were taken for, and what became of them."""

    source: str
    files: list[str]
    cache: str | None
    format: str
    format_reason: str
    rows_read: int
    rows_kept: int
    dropped: dict[str, int]
    first_dropped: dict[str, str]
    changed: dict[str, int]
    unused_columns: list[str]
    lengths: Lengths | None = None
    """None where nothing was tokenized yet, as of rows with pictures."""
    cut: int = 0
    notes: list[str] = field(default_factory=list)

    def lines(self, label: str) -> list[str]:
        where = f"; {self.cache}" if self.cache else ""
        count = f", {len(self.files)} files" if len(self.files) > 1 else ""
        lines = [f"{label}: {self.source}{count}{where}", f"  format: {self.format} ({self.format_reason})"]
        if self.unused_columns:
            lines.append(f"  columns not used: {', '.join(self.unused_columns)}")
        lines.append(f"  rows: {self.rows_read:,} read, {self.rows_kept:,} kept")
        lines += _dropped(self.dropped, self.first_dropped)
        lines += [f"    {number:,} × {change}" for change, number in self.changed.items()]
        lines += [self.lengths.line("row")] if self.lengths is not None else []
        return [*lines, *(f"  note: {note}" for note in self.notes)]


@dataclass
class DataReport:
    """The whole: the source, the evaluation source if there is one, and the rows that training gets."""

    train: SourceReport
    eval: SourceReport | None
    rows_train: int
    rows_eval: int
    split: str
    tokens: int
    trained_tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def trained_share(self) -> float:
        """Share of the training tokens that the loss is computed on."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def lines(self) -> list[str]:
        """The report, to print."""
        lines = self.train.lines("data")
        if self.eval is not None:
            lines += self.eval.lines("evaluation data")
        lines.append(_split(self.rows_train, self.rows_eval, self.split))
        tokens = f"{self.trained_tokens:,} of {self.tokens:,} training tokens ({self.trained_share:.0%})"
        return [*lines, f"loss on {tokens}", *(f"note: {note}" for note in self.notes)]

    def as_dict(self) -> dict[str, Any]:
        """The report, for JSON."""
        return {**asdict(self), "trained_share": round(self.trained_share, 4)}


@dataclass
class PictureReport:
    """Rows with pictures: the sources, what became of their rows and pictures, and how answers are scored."""

    train: SourceReport
    eval: SourceReport | None
    rows_train: int
    rows_eval: int
    split: str
    pictures: int
    checked: bool
    """Whether every picture was decoded, and not only found."""
    metric: str
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = self.train.lines("data")
        if self.eval is not None:
            lines += self.eval.lines("evaluation data")
        how = (
            "every one decoded whole" if self.checked else "not decoded before (vision.check_pictures=false)"
        )
        lines.append(f"pictures: {self.pictures:,} different, {how}")
        lines.append(_split(self.rows_train, self.rows_eval, self.split))
        return [*lines, f"answers scored by: {self.metric}", *(f"note: {note}" for note in self.notes)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class VoiceReport:
    """Rows of a voice: the sources, what became of their rows and clips, whose voices they are."""

    train: SourceReport
    eval: SourceReport | None
    rows_train: int
    rows_eval: int
    split: str
    minutes_train: float
    """Of what is to be spoken; references are not counted."""
    minutes_eval: float
    speakers: dict[str, int]
    """Rows of each, where rows name them."""
    clips: int
    """Different ones, references included."""
    rates: dict[int, int]
    """Clips of each sample rate."""
    checked: bool
    """Whether every clip was listened to, and not only found."""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = self.train.lines("data")
        if self.eval is not None:
            lines += self.eval.lines("evaluation data")
        if self.speakers:
            shown = [f"{name} ({rows:,})" for name, rows in self.speakers.items()]
            lines.append(f"speakers: {len(shown):,}, rows of each: {some_of(shown, 8)}")
        how = "every one listened to" if self.checked else "not listened to before (voice.check_clips=false)"
        rates = ", ".join(f"{number:,} × {rate:,} Hz" for rate, number in self.rates.items())
        lines.append(f"clips: {self.clips:,} different, {how}; {rates}")
        lines.append(f"sound: {_time(self.minutes_train)} to train on, {_time(self.minutes_eval)} held out")
        lines.append(_split(self.rows_train, self.rows_eval, self.split))
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _time(minutes: float) -> str:
    return f"{minutes * 60:.0f} seconds" if minutes < 2 else f"{minutes:,.1f} minutes"
