"""A kept voice made ready to be judged: rows that it speaks again, beside their true clips and the voices of the data.

It trains nothing, writes nothing and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import Config
from trimtab.recipes.recipe import Job
from trimtab.recipes.takes import Take, Takes
from trimtab.recipes.voice_look import of_each_speaker

if TYPE_CHECKING:
    from trimtab.data.clips import Clip
    from trimtab.data.voice_collate import CodedRow

MOST_SPEAKERS, MOST_CLIPS = 24, 8
"""Voices that a clip is compared with, and clips that each is known by; of a larger set these are enough to tell."""


def again(config: Config, folder: Path) -> Config:
    """With the codec that was learned for the run: one that is learned anew may speak of other sounds."""
    from trimtab.models.codec import kept_codec

    voice = config.voice.model_copy(update={"codec": kept_codec(config, folder)})
    return config.model_copy(update={"voice": voice})


def takes(job: Job, model: Any, most: int) -> Takes:
    """So many rows of each part, spoken as `trimtab speak` speaks them."""
    from trimtab.models.speak import sounded, speak

    own, config = job.prepared.own, job.config
    trained = of_each_speaker(job.prepared.train, most)
    held = of_each_speaker(job.prepared.eval or (), most)
    rows = [*trained, *held]
    job.say(f"speaking {len(trained)} trained and {len(held)} held-out rows")
    spoken = speak(model, own.collator, own.codec, rows, job.plan, config.voice, config.seed)
    made = []
    for number, (row, said) in enumerate(zip(rows, spoken, strict=True)):
        coded = None if row.target is None else sounded(own.codec, row.target).samples
        made.append(
            Take(
                text=row.row.text,
                where=row.row.where,
                trained=number < len(trained),
                speaker=row.row.speaker,
                spoken=said.samples,
                coded=coded,
                rate=said.rate,
                ended=said.ended,
                true=row.row.target,
                reference=row.row.reference,
            )
        )
    return Takes(made, _voices(rows, [*job.prepared.train, *(job.prepared.eval or ())]))


def _voices(spoken: Sequence[CodedRow], rows: Sequence[CodedRow]) -> dict[str, list[Clip]]:
    """Clips of each speaker, those of the spoken rows first; each file once."""
    found: dict[str, dict[Path, Clip]] = {}
    for row in (one.row for one in spoken):
        if row.speaker is not None:
            found.setdefault(row.speaker, {})
    for row in (one.row for one in rows):
        if row.speaker is None or (row.speaker not in found and len(found) >= MOST_SPEAKERS):
            continue
        clips = found.setdefault(row.speaker, {})
        for clip in (row.target, row.reference):
            # Two more than are needed: those of the row itself are left out of its own comparison.
            if clip is not None and len(clips) < MOST_CLIPS + 2:
                clips.setdefault(clip.path, clip)
    return {speaker: list(clips.values()) for speaker, clips in found.items()}
