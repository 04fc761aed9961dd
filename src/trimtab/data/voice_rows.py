"""A row of a voice: what is said, the clip that says it, and a clip of the same voice before it.

Says which columns hold that, and makes a row of them. Only names files and reads texts; no clip is opened here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trimtab.data.clean import BadRow, Tally, needed, text_of
from trimtab.data.clips import SUFFIXES, Clip
from trimtab.data.folders import from_folder, is_there
from trimtab.data.formats import MISSING, value_of
from trimtab.data.read import Row, decode_text
from trimtab.errors import RequestError

COLUMNS: dict[str, tuple[str, ...]] = {
    "audio": ("audio_file", "audio_path", "target_audio", "target_audio_file", "target", "file_name", "wav"),
    "text": ("transcript", "target_text", "target_transcript", "transcription", "sentence"),
    "text_file": ("transcript_file", "target_text_file", "target_transcript_file"),
    "reference": ("ref_audio_file", "ref_audio", "reference_audio", "reference_audio_file", "ref_audio_path"),
    "reference_text": ("ref_transcript", "ref_text", "reference_transcript"),
    "reference_text_file": ("ref_transcript_file", "ref_text_file", "reference_transcript_file"),
    "scene": ("scene_description",),
    "speaker": ("speaker_id", "speaker_name", "ref_speaker"),
    "id": ("audio_id", "uid"),
}
"""The columns, and what else they are called; `data.columns` names others. The first that a row has is read."""

SPEAKERS = "ref_speakers"
"""Where the community's layout keeps the references of a row with several voices."""

_LONGEST_TEXT = 1 << 20
"""Bytes of a file that says what is spoken in one clip."""
_SPECIAL = re.compile(r"<\|.*?\|>")
_NAME = re.compile(r"\w+")


@dataclass(frozen=True)
class VoiceRow:
    """A text, spoken; and how the voice sounds that speaks it."""

    text: str
    target: Clip | None
    """The text as it is spoken; None where it is still to be spoken."""
    reference: Clip | None
    reference_text: str | None
    """What is said in the reference; None where there is no reference."""
    scene: str | None
    speaker: str | None
    where: str
    """File and row."""


def used_columns(rows: Sequence[Row], mapping: Mapping[str, str]) -> dict[str, list[str]]:
    """Which columns of the file are read as what. A setting that names what is not there is an error."""
    there = dict.fromkeys(str(name) for row in rows for name in row.values)
    for column, actual in mapping.items():
        if column not in COLUMNS:
            near = get_close_matches(column, COLUMNS, n=1)
            raise RequestError.of(
                f"data.columns.{column}={actual}: rows of a voice have no column `{column}`",
                f"data.columns maps one of {', '.join(COLUMNS)} to the column that the file has",
                f"did you mean data.columns.{near[0]}={actual}?"
                if near
                else f"known here: {', '.join(COLUMNS)}",
            )
        if actual not in there and actual.split(".")[0] not in there:
            raise RequestError.of(
                f"data.columns.{column}={actual}: no row has a column `{actual}` (columns: {', '.join(there)})",
                "data.columns names a column that the file has",
                f"set data.columns.{column} to one of these columns, or remove it",
            )
    taken = set(mapping.values())
    named = {
        column: [mapping[column]]
        if column in mapping
        else [n for n in (column, *COLUMNS[column]) if n not in taken]
        for column in COLUMNS
    }
    used = {column: [n for n in names if n in there or column in mapping] for column, names in named.items()}
    if there and not used["audio"] and not used["id"]:
        raise RequestError.of(
            f"{rows[0].where}: no row names a clip (columns: {', '.join(there)})",
            f"a row names its clip by a column {_likely('audio')}, or by an `id` that a file is named by",
            f"set data.columns.audio={_of_clips(rows) or '<the column with the clips>'}",
        )
    return used


def _of_clips(rows: Sequence[Row]) -> str | None:
    """The column whose values look like files with sound."""
    for name, value in rows[0].values.items():
        if isinstance(value, str) and value.lower().endswith(SUFFIXES):
            return str(name)
    return None


def made(row: Row, columns: Mapping[str, list[str]], tally: Tally) -> VoiceRow:
    """The row as a voice's, its clips named and its texts read; BadRow with the reason where that cannot be."""
    reading = _Reading(row, columns, tally)
    target = reading.clip("audio") or reading.clip_by_id()
    text = reading.said("text", "text_file", target)
    if text is None:
        raise BadRow(
            f"no text: neither a column ({_likely('text')}, or data.columns.text) nor a .txt file beside the clip"
        )
    if (several := row.values.get(SPEAKERS)) is not None and not isinstance(several, list):
        raise BadRow(f"`{SPEAKERS}` is a {type(several).__name__}, not a list")
    if several and len(several) > 1:
        raise BadRow(f"`{SPEAKERS}` names several voices; a row is of one voice")
    heard = reading
    if several and isinstance(several[0], dict) and reading.value("reference")[0] is None:
        heard = _Reading(
            row._replace(values=several[0]), {c: [c, *names] for c, names in COLUMNS.items()}, tally
        )
    reference = heard.clip("reference")
    reference_text = heard.said("reference_text", "reference_text_file", reference)
    if reference is not None and reference_text is None:
        raise BadRow(
            f"reference clip without its text: neither a column ({_likely('reference_text')}) nor a .txt file beside it"
        )
    if reference is None and reference_text is not None:
        raise BadRow("the text of a reference clip, and no reference clip")
    return VoiceRow(text, target, reference, reference_text, reading.scene(), reading.speaker(), row.where)


class _Reading:
    """The values of one row, by the columns that are read."""

    def __init__(self, row: Row, columns: Mapping[str, list[str]], tally: Tally) -> None:
        self.row, self.columns, self.tally = row, columns, tally

    def value(self, column: str) -> tuple[Any, str]:
        """The first value that is there, and the name of its column."""
        names = self.columns[column] or [column]
        for name in names:
            found = value_of(self.row.values, name, {})
            # A table has NaN, which is not itself, where nothing is.
            if found is not MISSING and found is not None and found != "" and found == found:
                return found, name
        return None, names[0]

    def clip(self, column: str) -> Clip | None:
        value, name = self.value(column)
        if value is None:
            return None
        path = self.path(value, name)
        shown = str(value).strip()
        return Clip(path, f"{self.row.where} ({shown if len(shown) <= 100 else shown[:100] + '…'})")

    def clip_by_id(self) -> Clip:
        """`id.wav`, or another of the formats, beside the file with the rows."""
        value, _ = self.value("id")
        if value is None:
            raise BadRow(
                f"no clip: no column ({_likely('audio')}), and no `id` that a file could be named by"
            )
        named = self.path(str(value), "id")
        for path in (named.parent / f"{named.name}{suffix}" for suffix in SUFFIXES):
            if is_there(path):
                return Clip(path, f"{self.row.where} ({path.name})")
        raise BadRow(f"no clip: no column ({_likely('audio')}), and no file that is named by `id`")

    def path(self, value: Any, name: str) -> Path:
        if not isinstance(value, str):
            kind = "an object" if isinstance(value, dict) else f"of type {type(value).__name__}"
            raise BadRow(f"`{name}` is {kind}, not the path of a clip; write clips as files and name them")
        text = value.strip()
        scheme = text[:12].partition(":")[0].lower()
        if scheme in ("http", "https", "s3", "gs", "ftp"):
            raise BadRow(f"`{name}` is a {scheme} address; download the clips and name the files")
        if scheme == "file":
            text = unquote(urlsplit(text).path)
        if not text.strip("/"):
            raise BadRow(f"`{name}` is {'empty' if not text else 'no file'}")
        return from_folder(text, self.row, "clip")

    def said(self, column: str, file_column: str, clip: Clip | None) -> str | None:
        """The words of a clip: in the row, in the file that it names, or in the .txt file beside the clip."""
        value, name = self.value(column)
        if value is not None:
            return checked_text(needed(value, name, self.tally), f"`{name}`")
        value, name = self.value(file_column)
        file = self.path(value, name) if value is not None else None
        if file is None and clip is not None:
            beside = clip.path.parent / f"{clip.path.stem}.txt"
            file = beside if is_there(beside) else None
        if file is None:
            return None
        return checked_text(_text_in(file), "the text file")

    def scene(self) -> str | None:
        """How it sounds there. A mere name (`quiet_room`, as the community's layout has it) is made a sentence."""
        value, name = self.value("scene")
        text = checked_text(text_of(value, name, self.tally), f"`{name}`", empty=True)
        if not _NAME.fullmatch(text):
            return text or None
        if text.lower() in ("unknown", "none", "null"):
            return None
        self.tally.change("name of a scene written as `Audio is recorded from …`")
        return f"Audio is recorded from {text.replace('_', ' ')}."

    def speaker(self) -> str | None:
        value, name = self.value("speaker")
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise BadRow(f"`{name}` is a {type(value).__name__}, not a name")
        return None if value is None else str(value).strip() or None


def checked_text(text: str, name: str, empty: bool = False) -> str:
    """The text without the space around it; BadRow where it holds what cannot be said or would be read as a token."""
    text = text.strip()
    if not text and not empty:
        raise BadRow(f"{name} is empty")
    if special := _SPECIAL.search(text):
        raise BadRow(f"{name} holds {special[0]}, which a tokenizer reads as a token of its own")
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\r\t":
            kind = "control character" if unicodedata.category(character) == "Cc" else "half of a character"
            raise BadRow(f"{name} holds the {kind} U+{ord(character):04X}")
    return text


def _text_in(file: Path) -> str:
    try:
        if not file.is_file():
            raise BadRow(f"the text file cannot be read ({'not a file' if file.exists() else 'not there'})")
        if file.stat().st_size > _LONGEST_TEXT:
            raise BadRow(f"the text file has over {_LONGEST_TEXT >> 20} MiB")
        return decode_text(file.read_bytes(), str(file))
    except OSError as error:
        raise BadRow(f"the text file cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise BadRow("the text file has a path that no file can have") from None
    except RequestError:
        raise BadRow("the text file is not UTF-8") from None


def _likely(column: str) -> str:
    return ", ".join(f"`{name}`" for name in (column, *COLUMNS[column][:2]))
