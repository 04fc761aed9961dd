"""Listens to every clip before training, in threads: is it there, whole, long enough, heard, and not clipped.

A row with a broken clip is dropped and counted, or stops the run (`data.bad_rows`). Keeps no samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trimtab.config.schema import VoiceSettings
from trimtab.data.clean import BadRow, Tally
from trimtab.data.clips import Clip
from trimtab.data.sound import Samples, check_long, clipped, decode, header, loudness, mixed, peak
from trimtab.data.voice_rows import VoiceRow

MOST_THREADS = 8


@dataclass(frozen=True)
class Heard:
    """What is known of a clip: the digest of its file, and what the file says or was found to hold."""

    digest: str
    rate: int
    channels: int
    seconds: float


@dataclass(frozen=True)
class CheckedRow:
    """A row whose clips are all right."""

    row: VoiceRow
    target: Heard
    reference: Heard | None

    @property
    def key(self) -> str:
        """The same for two rows that teach the same, whatever their files are called."""
        row, reference = self.row, self.reference.digest if self.reference else None
        whole = json.dumps([row.text, self.target.digest, row.reference_text, reference, row.scene])
        return hashlib.sha256(whole.encode()).hexdigest()


class BadClip(BadRow):
    """A clip that cannot be trained on, with what was found: kept apart, so that equal faults are counted as one."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(reason)
        self.found = found


def checked_rows(
    rows: Sequence[VoiceRow], voice: VoiceSettings, tally: Tally, repeats: bool
) -> list[CheckedRow]:
    """The rows whose clips are all right. Unless `repeats`, one that equals an earlier row in content is dropped."""
    from rich.console import Console
    from rich.progress import track

    kept: list[CheckedRow] = []
    seen: set[str] = set()
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="clips")
    try:
        looked: dict[Path, Future[Heard]] = {}
        for clip in (clip for row in rows for clip in (row.target, row.reference) if clip is not None):
            if clip.path not in looked:
                looked[clip.path] = pool.submit(_listen, clip, voice)
        for row in track(
            rows,
            description=f"listening to {len(looked):,} clips",
            console=Console(stderr=True),
            transient=True,
            disable=not (looked and sys.stderr.isatty()),
        ):
            assert row.target is not None  # rows that are prepared have one
            clip = row.target
            try:
                target, reference = looked[clip.path].result(), None
                if row.reference is not None:
                    clip = row.reference
                    reference = looked[clip.path].result()
            except BadRow as bad:
                found = f", {bad.found}" if isinstance(bad, BadClip) else ""
                tally.bad(str(bad), f"{clip.where}{found}")
                continue
            checked = CheckedRow(row, target, reference)
            if checked.key in seen and not repeats:
                tally.drop("repeats an earlier row", row.where)
                continue
            seen.add(checked.key)
            kept.append(checked)
    finally:
        pool.shutdown(cancel_futures=True)
    return kept


def _listen(clip: Clip, voice: VoiceSettings) -> Heard:
    told = header(clip.path)
    _check_length(told.frames, told.rate, voice)
    if not voice.check_clips:
        return Heard(clip.key, told.rate, told.channels, told.frames / told.rate)
    frames, rate = decode(clip.path, voice.max_seconds)
    _check_length(len(frames), rate, voice)
    _check_loud(frames, rate, voice.silence)
    if (share := clipped(frames)) > voice.clipping:
        raise BadClip(
            f"clip is clipped: more than voice.clipping={voice.clipping:g} of it stands at full scale",
            f"{share:.1%}",
        )
    return Heard(clip.key, rate, frames.shape[1], len(frames) / rate)


def _check_loud(frames: Samples, rate: int, silence: float) -> None:
    """By what is heard once the channels are mixed down."""
    samples = mixed(frames)
    loud = loudness(samples, rate)
    if loud >= silence:
        return
    if frames.shape[1] > 1 and max(loudness(channel, rate) for channel in frames.T) >= silence:
        raise BadRow("clip is silent when mixed down: its channels cancel each other; keep one of them")
    if not peak(samples - samples[0]):
        what = "silent: nothing but zeros" if not samples[0] else "one constant value, no sound"
        raise BadRow(f"clip is {what}")
    raise BadClip(
        f"clip is silent: its loudest tenth of a second is under voice.silence={silence:g} dB",
        f"{loud:.0f} dB",
    )


def _check_length(frames: int, rate: int, voice: VoiceSettings) -> None:
    seconds = frames / rate
    try:
        if not frames:
            raise BadRow("clip has no frames")
        if seconds < voice.min_seconds:
            raise BadRow(f"clip is shorter than voice.min_seconds={voice.min_seconds:g}")
        check_long(frames, rate, voice.max_seconds)
    except BadRow as bad:
        raise BadClip(str(bad), f"{seconds:.2f} s") from None
