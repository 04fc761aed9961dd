"""Judges clips that a model spoke: can one understand them, do they end, and whose voice is it.

Word errors stand beside those of the true clip and of the true clip after the codec's round trip, for recogniser and
codec have their limits. An instrument that is not installed is told as missing; the other figures are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.bench import speakers, word_errors
from trimtab.bench.speakers import SpeakerEncoder, centre, likeness
from trimtab.bench.word_errors import Recogniser, WordErrors
from trimtab.errors import RequestError
from trimtab.recipes.takes import Take, Takes

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from trimtab.data.clips import Clip

    Embedding = NDArray[np.float32]

Say = Callable[[str], None]
Tool = TypeVar("Tool")
PARTS = {"trained": True, "held_out": False}
HEARD = ("spoken", "true", "coded")
"""What the recogniser listens to: what the model said, the true clip, and that after the codec's round trip."""


def judge_voice(takes: Takes, say: Say) -> dict[str, Any]:
    """Every row with its figures, and those of the trained rows and of the held-out ones together."""
    missing: list[str] = []
    recogniser = _tool(Recogniser, missing)
    encoder = _tool(SpeakerEncoder, missing)
    heard = Ears(recogniser) if recogniser is not None else None
    voices = Voices(encoder, takes.voices) if encoder is not None else None
    rows = []
    for number, take in enumerate(takes.rows, 1):
        say(f"listening to clip {number} of {len(takes.rows)}")
        rows.append(_row(take, heard, voices))
    parts = {
        name: _together([row for row in rows if row["trained"] is trained]) for name, trained in PARTS.items()
    }
    if voices is not None and len(takes.voices) < 2:
        missing.append(
            f"likeness to other speakers: the data names {'one' if takes.voices else 'no'} speaker (`speaker` of a row)"
        )
    return {"speakers": sorted(takes.voices), **parts, "rows": rows, "missing": missing}


def _tool(kind: Callable[[], Tool], missing: list[str]) -> Tool | None:
    try:
        return kind()
    except RequestError as error:
        missing.append(str(error))
        return None


class Ears:
    """The recogniser, which hears a true clip once, however many rows have it."""

    def __init__(self, recogniser: Recogniser) -> None:
        self._recogniser = recogniser
        self._clips: dict[str, str] = {}

    def of(self, take: Take) -> dict[str, str]:
        """What is understood of each of a row's clips that there are."""
        found = {"spoken": self._recogniser.hear(take.spoken, take.rate)}
        if take.true is not None:
            key = take.true.key
            if key not in self._clips:
                sound = take.true.sound(word_errors.RATE)
                self._clips[key] = self._recogniser.hear(sound, word_errors.RATE)
            found["true"] = self._clips[key]
        if take.coded is not None:
            found["coded"] = self._recogniser.hear(take.coded, take.rate)
        return found


class Voices:
    """The speakers of the data, each by the clips there are of them."""

    def __init__(self, encoder: SpeakerEncoder, clips: Mapping[str, Sequence[Clip]]) -> None:
        self._encoder, self._clips = encoder, clips
        self._found: dict[str, Embedding | None] = {}
        self._keys: dict[Path, str] = {}

    def alike(self, take: Take) -> dict[str, Any]:
        """How near the spoken clip is to its reference, to its speaker and to each other one; None: no voice in it.

        Its speaker's voice is taken from clips that are neither the reference nor what the row should have become: the
        one was heard just before, and the other may have been learned by heart.
        """
        spoken = self._encoder.embed(take.spoken, take.rate)
        own = self._voice(take.speaker, [take.true, take.reference])
        reference = None if take.reference is None else self._clip(take.reference)
        others = {
            name: self._voice(name, [take.true, take.reference])
            for name in self._clips
            if name != take.speaker and take.speaker is not None
        }
        to_own, to_reference = _between(spoken, own), _between(spoken, reference)
        to_others = {name: _between(spoken, voice) for name, voice in others.items()}
        # Where the speaker has no other clip, the reference is what there is of the voice.
        nearest_to = to_own if own is not None else to_reference
        known = [value for value in to_others.values() if value is not None]
        return {
            "reference": to_reference,
            "own_speaker": to_own,
            "others": to_others,
            "nearer_to_own": None if not others else _nearer(nearest_to, known),
        }

    def _voice(self, name: str | None, without: Iterable[Clip | None]) -> Embedding | None:
        left_out = {self._key(clip) for clip in without if clip is not None}
        clips = self._clips.get(name, ()) if name is not None else ()
        found = [self._clip(clip) for clip in clips if self._key(clip) not in left_out]
        heard = [embedding for embedding in found if embedding is not None]
        return centre(heard) if heard else None

    def _key(self, clip: Clip) -> str:
        """What is in the file, looked at once."""
        if clip.path not in self._keys:
            self._keys[clip.path] = clip.key
        return self._keys[clip.path]

    def _clip(self, clip: Clip) -> Embedding | None:
        key = self._key(clip)
        if key not in self._found:
            self._found[key] = self._encoder.embed(clip.sound(speakers.RATE), speakers.RATE)
        return self._found[key]


def _between(one: Embedding | None, other: Embedding | None) -> float | None:
    return None if one is None or other is None else likeness(one, other)


def _nearer(own: float | None, others: Sequence[float]) -> bool:
    """A clip without a voice is near to nobody."""
    return own is not None and bool(others) and own > max(others)


def _row(take: Take, ears: Ears | None, voices: Voices | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": take.text,
        "where": take.where,
        "trained": take.trained,
        "speaker": take.speaker,
        "seconds": len(take.spoken) / take.rate,
        "ended": take.ended,
    }
    if ears is not None:
        understood = ears.of(take)
        counts = {name: word_errors.word_errors(take.text, text) for name, text in understood.items()}
        row["heard"] = understood
        row["word_errors"] = {
            name: {"edits": count.edits, "words": count.words, "rate": count.rate}
            for name, count in counts.items()
        }
    if voices is not None:
        row["likeness"] = voices.alike(take)
    return row


def _together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of several rows as one."""
    found: dict[str, Any] = {"rows": len(rows)}
    if not rows:
        return found
    found |= {
        "ended": sum(bool(row["ended"]) for row in rows),
        "seconds": _mean([row["seconds"] for row in rows]),
    }
    if "word_errors" in rows[0]:
        found["word_error_rate"] = {name: _rate(rows, name) for name in HEARD}
    if "likeness" in rows[0]:
        alike = [row["likeness"] for row in rows]
        asked = [one["nearer_to_own"] for one in alike if one["nearer_to_own"] is not None]
        found["likeness"] = {
            "reference": _mean([one["reference"] for one in alike]),
            "own_speaker": _mean([one["own_speaker"] for one in alike]),
            "nearest_other": _mean(
                [max(filter(_known, one["others"].values()), default=None) for one in alike]
            ),
        }
        found["nearer_to_own"] = {"rows": sum(asked), "of": len(asked)} if asked else None
    return found


def _rate(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    counts = [row["word_errors"][name] for row in rows if name in row["word_errors"]]
    return word_errors.total(WordErrors(count["edits"], count["words"]) for count in counts).rate


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _known(value: float | None) -> bool:
    return value is not None


def voice_lines(judged: Mapping[str, Any]) -> list[str]:
    """The figures as a table for people: trained rows and held-out ones side by side."""
    named = {"trained": "trained on", "held_out": "held out"}
    parts = {name: judged[name] for name in PARTS if judged[name]["rows"]}
    table = [["spoken rows", *(f"{part['rows']} {named[name]}" for name, part in parts.items())]]

    def line(name: str, told: Callable[[Mapping[str, Any]], str]) -> None:
        table.append([name, *(told(part) for part in parts.values())])

    line("ended by itself", lambda part: f"{part['ended']} of {part['rows']}")
    line("seconds, mean", lambda part: f"{part['seconds']:.2f}")
    if all("word_error_rate" in part for part in parts.values()):
        for key, name in zip(HEARD, ("", ", true clip", ", true clip through the codec"), strict=True):
            line("word error rate" + name, _reading("word_error_rate", key))
    if all("likeness" in part for part in parts.values()):
        for key, name in (
            ("reference", "its reference"),
            ("own_speaker", "its speaker"),
            ("nearest_other", "the nearest other speaker"),
        ):
            line(f"likeness to {name}", _reading("likeness", key))
        line(
            "nearer to its speaker",
            lambda part: "-" if (n := part["nearer_to_own"]) is None else f"{n['rows']} of {n['of']}",
        )
    return [*aligned(table), *(f"not judged: {text}" for text in judged["missing"])]


def _reading(kind: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    """What tells one figure of a part."""
    return lambda part: _told(part[kind][name])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its name, then its figures under one another."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]) for name, *figures in table
    ]


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
