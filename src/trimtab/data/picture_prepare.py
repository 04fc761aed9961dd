"""From `data.source` to rows with pictures that a trainer takes: read, recognise, check, split, report.

Stays on the CPU and knows no model. Every picture has been opened once when this returns (vision.check_pictures), and
no picture is on both sides of the split, however many questions are asked about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Literal

from trimtab.config.schema import DataSettings, VisionSettings
from trimtab.data.clean import Tally, usable
from trimtab.data.picture_check import checked_rows, groups
from trimtab.data.picture_rows import read_own
from trimtab.data.picture_set_rows import read_set
from trimtab.data.picture_sets import check_split, find_set
from trimtab.data.picture_source import load_picture_rows
from trimtab.data.pictures import PictureRow
from trimtab.data.report import PictureReport, SourceReport
from trimtab.data.split import hold_out
from trimtab.errors import RequestError

Part = Literal["train", "eval"]
Draw = Callable[[Part, int, int], list[PictureRow]]
Fitting = Callable[[PictureRow, Tally], bool]


@dataclass(frozen=True)
class PreparedPictures:
    """Rows to train on and to evaluate by, how they came about, and the metric that scores answers."""

    train: list[PictureRow]
    eval: list[PictureRow] | None
    report: PictureReport
    metric: str


@dataclass(frozen=True)
class BuiltIn:
    """A source of pictures that Trimtab makes itself: from a part, a number of rows and a seed."""

    draw: Draw
    train: int
    eval: int


def _drawn(part: Part, number: int, seed: int) -> list[PictureRow]:
    from trimtab.data.drawn import drawn_rows

    rows: list[PictureRow] = drawn_rows(part, number, seed)
    return rows


BUILT_IN = {"drawn-pictures": BuiltIn(_drawn, train=16000, eval=300)}
"""The built-in sources of pictures, by the name that `data.source` has for them."""

# The pictures are the same ones in every run; the run's own seed is for their order.
_DRAWN_SEED = 0

_WITH_SPLIT = re.compile(r"(.+)\[([\w.-]+)\]")


@dataclass
class _Source:
    """The rows of one source that passed, with what ties them together and what is reported."""

    rows: list[PictureRow]
    digests: list[frozenset[str]]
    about: SourceReport
    metric: str | None
    groups: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = groups(self.rows, self.digests)

    @property
    def pictures(self) -> frozenset[str]:
        return frozenset().union(*self.digests)


def prepare_pictures(
    data: DataSettings,
    vision: VisionSettings,
    seed: int,
    say: Callable[[str], None],
    fits: Fitting | None = None,
) -> PreparedPictures:
    """Read, check and split the rows of a run with pictures. `say` tells what takes long; `fits` what a model takes."""
    main = _read(data.source, "data.source", "train", data, vision, say, fits)
    held: _Source | None = None
    train, evaluated, split = main.rows, list[PictureRow](), "data.eval_fraction=0"
    notes: list[str] = []
    own = data.source if data.source in BUILT_IN and data.eval_fraction > 0 else None
    if source := data.eval_source or own:
        held = _read(source, "data.eval_source", "eval", data, vision, say, fits)
        evaluated = held.rows
        split = f"data.eval_source={source}" if data.eval_source else "the set's own held-out pictures"
        if shared := len(main.pictures & held.pictures):
            notes.append(
                f"data.eval_source and data.source share {shared:,} picture{'' if shared == 1 else 's'}: "
                "what is evaluated was seen in training"
            )
    elif data.eval_fraction > 0:
        train, evaluated, split = _hold_out(main, data, seed)
    metric = vision.metric or main.metric or "exact"
    report = PictureReport(
        train=main.about,
        eval=held.about if held is not None else None,
        rows_train=len(train),
        rows_eval=len(evaluated),
        split=split,
        pictures=len(main.pictures | (held.pictures if held is not None else frozenset())),
        checked=vision.check_pictures,
        metric=metric,
        notes=notes,
    )
    return PreparedPictures(train, evaluated or None, report, metric)


def _hold_out(
    source: _Source, data: DataSettings, seed: int
) -> tuple[list[PictureRow], list[PictureRow], str]:
    """By picture, not by row: a second question about a picture that was trained on proves little."""
    if len(set(source.groups)) < 2:
        raise RequestError.of(
            f"data.eval_fraction={data.eval_fraction}: all {len(source.rows):,} rows hang together by their pictures",
            "a picture is trained on or held out, never both",
            "set data.eval_fraction=0, name a data.eval_source, or give rows with other pictures",
        )
    together = list(zip(source.rows, source.groups, strict=True))
    train, held, split = hold_out(together, lambda pair: pair[1], data.eval_fraction, seed)
    return [row for row, _ in train], [row for row, _ in held], f"{split}, by picture"


def _read(
    source: str,
    setting: str,
    part: Part,
    data: DataSettings,
    vision: VisionSettings,
    say: Callable[[str], None],
    fits: Fitting | None,
) -> _Source:
    tally = Tally(strict=data.bad_rows == "stop")
    if source in BUILT_IN:
        made = BUILT_IN[source]
        number = min(data.max_rows or made.train, made.train if part == "train" else made.eval)
        rows = made.draw(part, number, _DRAWN_SEED)
        about = _about(source, f"{source} (built in)", [source], "pictures that Trimtab draws", len(rows))
        metric = None
    else:
        rows, about, metric = _rows_of(source, setting, data, vision, tally)
    if vision.check_pictures and sum(len(row.pictures) for row in rows) >= 1000:
        say(f"checking the pictures of {len(rows):,} rows (vision.check_pictures)")
    kept, digests = checked_rows(
        rows, vision.max_pixels, vision.check_pictures, tally, repeats=data.keep_duplicates
    )
    if fits is not None:
        fitting = [fits(row, tally) for row in kept]
        kept, digests = list(compress(kept, fitting)), list(compress(digests, fitting))
    if not kept:
        raise RequestError.of(
            f"{setting}={source}: none of its {about.rows_read:,} rows can be trained on",
            "; ".join(tally.reasons()),
            "repair the rows and their pictures, check data.columns, or raise data.max_length",
        )
    about.rows_kept = len(kept)
    about.dropped = dict(tally.dropped.most_common())
    about.first_dropped = dict(tally.first)
    about.changed = dict(tally.changed.most_common())
    return _Source(kept, digests, about, metric)


def _rows_of(
    source: str, setting: str, data: DataSettings, vision: VisionSettings, tally: Tally
) -> tuple[list[PictureRow], SourceReport, str | None]:
    if with_split := _WITH_SPLIT.fullmatch(source):
        source, data = with_split[1], data.model_copy(update={"split": with_split[2]})
    found = find_set(source, data.subset, vision.dataset)
    known, home = found if found is not None else (None, None)
    if known is not None and home is not None:
        check_split(known, home, data.split, setting)
        data = data.model_copy(update={"subset": home.subset or data.subset})
    loaded = load_picture_rows(source, data, known, setting)
    if known is not None:
        chosen = f"vision.dataset={vision.dataset}" if vision.dataset else f"{setting}={source}"
        reading = read_set(known, loaded.rows, data.columns, tally, chosen)
    else:
        reading = read_own(loaded.rows, data, tally)

    # Which rows repeat others is told later, by what is in their pictures.
    found_rows = usable(reading.rows, reading.make, lambda made: made.where, tally, repeats=True)
    rows = [made for _, made in found_rows]
    about = _about(reading.name, loaded.source, loaded.files, reading.reason, len(loaded.rows))
    about.cache, about.unused_columns, about.notes = loaded.cache, reading.unused, list(loaded.notes)
    if len(reading.rows) != len(loaded.rows):
        about.notes.append(f"{len(loaded.rows):,} rows hold {len(reading.rows):,} questions, a row each")
    return rows, about, reading.metric


def _about(name: str, source: str, files: Sequence[str], reason: str, read: int) -> SourceReport:
    return SourceReport(
        source=source,
        files=list(files),
        cache=None,
        format=name,
        format_reason=reason,
        rows_read=read,
        rows_kept=read,
        dropped={},
        first_dropped={},
        changed={},
        unused_columns=[],
    )
