"""From `data.source` to rows of a voice that a codec and a trainer take: read, recognise, check, split, report.

Stays on the CPU and knows no model. Every clip has been listened to once when this returns (voice.check_clips). No clip
that is to be spoken in evaluation is spoken, or heard as a reference, in training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trimtab.config.schema import DataSettings, VoiceSettings
from trimtab.data.clean import Tally, usable
from trimtab.data.report import SourceReport, VoiceReport
from trimtab.data.sound import RATE
from trimtab.data.split import held_out
from trimtab.data.voice_check import CheckedRow, Heard, checked_rows
from trimtab.data.voice_rows import SPEAKERS, VoiceRow, made, used_columns
from trimtab.data.voice_source import BUILT_IN as BUILT_IN
from trimtab.data.voice_source import load_voice_rows
from trimtab.errors import RequestError

_WITH_SPLIT = re.compile(r"(.+)\[([\w.-]+)\]")


@dataclass(frozen=True)
class PreparedVoice:
    """Rows to train on and to evaluate by, and how they came about."""

    train: list[VoiceRow]
    eval: list[VoiceRow] | None
    report: VoiceReport


@dataclass
class _Source:
    """The rows of one source that passed, and what is reported of it."""

    rows: list[CheckedRow]
    about: SourceReport


def prepare_voice(
    data: DataSettings, voice: VoiceSettings, seed: int, say: Callable[[str], None]
) -> PreparedVoice:
    """Read, check and split the rows of a voice. `say` tells what takes long."""
    main = _read(data.source, "data.source", data, voice, say)
    held: _Source | None = None
    train, evaluated, split = main.rows, list[CheckedRow](), "data.eval_fraction=0"
    notes: list[str] = []
    if data.eval_source:
        held = _read(data.eval_source, "data.eval_source", data, voice, say)
        evaluated, split = held.rows, f"data.eval_source={data.eval_source}"
        heard = {clip.digest for row in train for clip in (row.target, row.reference) if clip is not None}
        if shared := len(heard & {row.target.digest for row in evaluated}):
            notes.append(
                f"data.source has {shared:,} of the clips that data.eval_source asks for: "
                "what is evaluated was heard in training"
            )
    elif data.eval_fraction > 0:
        train, evaluated, split = _hold_out(main, data, seed)
    clips = {
        clip.digest: clip for row in (*train, *evaluated) for clip in (row.target, row.reference) if clip
    }
    report = VoiceReport(
        train=main.about,
        eval=held.about if held is not None else None,
        rows_train=len(train),
        rows_eval=len(evaluated),
        split=split,
        minutes_train=_minutes(train),
        minutes_eval=_minutes(evaluated),
        speakers=_speakers([*train, *evaluated]),
        clips=len(clips),
        rates=dict(sorted(Counter(clip.rate for clip in clips.values()).items())),
        checked=voice.check_clips,
        notes=notes + _notes([*train, *evaluated], clips.values()),
    )
    return PreparedVoice([row.row for row in train], [row.row for row in evaluated] or None, report)


def _hold_out(
    source: _Source, data: DataSettings, seed: int
) -> tuple[list[CheckedRow], list[CheckedRow], str]:
    """By clip: what is to be spoken is trained on or held out, never both. A reference ties nothing together, but a
    clip that others have for their reference is held out last, since these rows could then not be trained on."""
    targets = [row.target.digest for row in source.rows]
    if len(set(targets)) < 2:
        raise RequestError.of(
            f"data.eval_fraction={data.eval_fraction}: all {len(targets):,} rows speak the same clip",
            "a clip is trained on or held out, never both",
            "set data.eval_fraction=0, name a data.eval_source, or give rows with other clips",
        )
    referred = {
        row.reference.digest
        for row in source.rows
        if row.reference is not None and row.reference.digest != row.target.digest
    }
    chosen = held_out(targets, data.eval_fraction, seed, last=referred)
    held = [row for row in source.rows if row.target.digest in chosen]
    train = [row for row in source.rows if row.target.digest not in chosen]
    hears = [row for row in train if row.reference is not None and row.reference.digest in chosen]
    if hears:
        why = "its reference is a clip that is held out"
        source.about.dropped[why] = len(hears)
        source.about.first_dropped[why] = hears[0].row.where
        source.about.rows_kept -= len(hears)
        train = [row for row in train if row.reference is None or row.reference.digest not in chosen]
    if not train:
        raise RequestError.of(
            f"data.eval_fraction={data.eval_fraction}: no row is left to train on",
            "the reference of every other row is a clip that would be held out",
            "set data.eval_fraction=0, name a data.eval_source, or give references that no row speaks",
        )
    return train, held, f"data.eval_fraction={data.eval_fraction}, seed {seed}, by clip"


def _read(
    source: str, setting: str, data: DataSettings, voice: VoiceSettings, say: Callable[[str], None]
) -> _Source:
    tally = Tally(strict=data.bad_rows == "stop")
    if (with_split := _WITH_SPLIT.fullmatch(source)) and not Path(source).exists():
        source, data = with_split[1], data.model_copy(update={"split": with_split[2]})
    loaded = load_voice_rows(source, data, setting)
    columns = used_columns(loaded.rows, data.columns)
    found = usable(
        loaded.rows,
        lambda row: made(row, columns, tally),
        lambda row: row.where,
        tally,
        # Which rows repeat others is told later, by what is in their clips.
        repeats=True,
    )
    rows = [row for _, row in found]
    if voice.check_clips and len(rows) >= 200:
        say(f"listening to the clips of {len(rows):,} rows (voice.check_clips)")
    kept = checked_rows(rows, voice, tally, repeats=data.keep_duplicates)
    if not kept:
        raise RequestError.of(
            f"{setting}={source}: none of its {len(loaded.rows):,} rows can be trained on",
            "; ".join(tally.reasons()),
            "repair the rows and their clips, or check data.columns",
        )
    for channels, number in Counter(_channels(kept)).items():
        tally.changed[f"clip of {channels} channels mixed down to one"] += number
    read = {name for names in columns.values() for name in names} | {SPEAKERS}
    about = SourceReport(
        source=loaded.source,
        files=loaded.files,
        cache=None,
        format="clips",
        format_reason="; ".join(
            f"{column} from {', '.join(names)}"
            for column, names in columns.items()
            if names and column != "id"
        ),
        rows_read=len(loaded.rows),
        rows_kept=len(kept),
        dropped=dict(tally.dropped.most_common()),
        first_dropped=dict(tally.first),
        changed=dict(tally.changed.most_common()),
        unused_columns=[
            name
            for name in dict.fromkeys(str(n) for row in loaded.rows for n in row.values)
            if name not in read
        ],
        notes=list(loaded.notes),
    )
    return _Source(kept, about)


def _channels(rows: Iterable[CheckedRow]) -> list[int]:
    """Of each clip that has more than one."""
    clips = {clip.digest: clip for row in rows for clip in (row.target, row.reference) if clip is not None}
    return [clip.channels for clip in clips.values() if clip.channels > 1]


def _minutes(rows: Iterable[CheckedRow]) -> float:
    return sum(row.target.seconds for row in rows) / 60


def _speakers(rows: Iterable[CheckedRow]) -> dict[str, int]:
    return dict(Counter(row.row.speaker for row in rows if row.row.speaker is not None).most_common())


def _notes(rows: list[CheckedRow], clips: Iterable[Heard]) -> list[str]:
    """What is no fault, and yet should be known."""
    notes = []
    if low := sum(clip.rate < RATE for clip in clips):
        notes.append(
            f"{_some(low, 'clip')} under {RATE:,} Hz: resampled, but what is above half of the old rate is not there"
        )
    if copied := sum(row.reference is not None and row.reference.digest == row.target.digest for row in rows):
        notes.append(
            f"{_some(copied, 'row')} with the target itself for a reference: it can be copied, and is not learned"
        )
    said: dict[str, set[str]] = {}
    for row in rows:
        said.setdefault(row.target.digest, set()).add(row.row.text)
    if several := sum(len(texts) > 1 for texts in said.values()):
        notes.append(f"{_some(several, 'clip')} with more than one text: only one can be what is said")
    return notes


def _some(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
