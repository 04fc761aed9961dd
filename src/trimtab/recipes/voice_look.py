"""What a voice sounds like before and after training: rows that are spoken, and their clips in the run's folder.

It trains nothing. The clips beside those of the model are the row's own: its reference, the true clip, and what the
codec alone makes of that, which is as well as a model with this codec can sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.voice import SPECTRAL
from trimtab.models.load import shapes_only
from trimtab.recipes.kept_folder import whole_kept
from trimtab.recipes.look import Look
from trimtab.recipes.recipe import Job

if TYPE_CHECKING:
    from trimtab.data.voice_collate import CodedRow
    from trimtab.models.spoken import Spoken

CLIPS = "clips"
"""The folder of a run that keeps the clips it is heard by."""
CODEC = "codec"
"""The folder of a run that keeps the codec which was learned for it."""


def shown(job: Job) -> list[tuple[CodedRow, bool]]:
    """The rows that are spoken, and whether each is trained on: half of them are held out, where there are such."""
    # Without values nothing is said.
    show = 0 if shapes_only() else job.config.voice.show
    held = of_each_speaker(job.prepared.eval or (), show // 2)
    trained = of_each_speaker(job.prepared.train, show - len(held))
    return [*((row, True) for row in trained), *((row, False) for row in held)]


def of_each_speaker(rows: Sequence[CodedRow], most: int) -> list[CodedRow]:
    """So many rows, the first of every speaker before the second of any: rows of one often stand together."""
    had: Counter[str | None] = Counter()
    turns = []
    for place, row in enumerate(rows):
        turns.append((had[row.row.speaker], place))
        had[row.row.speaker] += 1
    return [rows[place] for _, place in sorted(turns)[:most]]


def asks(job: Job) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row.row.text,
            "speaker": row.row.speaker,
            "row": "trained on" if trained else "held out",
            CLIPS: _files(number, row),
        }
        for number, (row, trained) in enumerate(shown(job))
    ]


def look(job: Job, model: Any) -> Look:
    """The shown rows, spoken; the process that writes keeps the clips."""
    from trimtab.models.speak import speak

    rows, own, voice = [row for row, _ in shown(job)], job.prepared.own, job.config.voice
    if not rows:
        return Look([])
    spoken = speak(model, own.collator, own.codec, rows, job.plan, voice, job.config.seed)
    if job.main and rows:
        _keep_clips(job, rows, spoken)
    return Look([one.told(voice.silence) for one in spoken])


def keep_codec(job: Job) -> None:
    """The codec that was learned for this run: no other reads the codes that its model says."""
    if job.config.voice.codec == SPECTRAL and not shapes_only():
        with whole_kept(job.run.claim(CODEC), job.say) as folder:
            job.prepared.own.codec.save_pretrained(folder)


def _files(number: int, row: CodedRow) -> dict[str, str]:
    """Where the clips of a sample lie, by what they are, in the order in which they are heard."""
    there = ("reference",) if row.reference is not None else ()
    return {name: f"{CLIPS}/{number}-{name}.wav" for name in (*there, "true", "codec", "before", "after")}


def _keep_clips(job: Job, rows: Sequence[CodedRow], spoken: Sequence[Spoken]) -> None:
    from trimtab.data.sound import write_wav
    from trimtab.models.speak import sounded

    job.run.claim(CLIPS)
    codec = job.prepared.own.codec
    rate = codec.config.sample_rate
    for number, (row, said) in enumerate(zip(rows, spoken, strict=True)):
        files = {name: job.run.path / file for name, file in _files(number, row).items()}
        if job.stage == "before":
            for name, clip in (("reference", row.row.reference), ("true", row.row.target)):
                if clip is not None:
                    write_wav(files[name], clip.sound(rate), rate)
            if row.target is not None:
                _keep(sounded(codec, row.target), files["codec"])
        _keep(said, files[job.stage])


def _keep(spoken: Spoken, file: Path) -> None:
    """The clip's file; none where there is no sound, also not that of an earlier start of the run."""
    if len(spoken.samples):
        spoken.write(file)
    else:
        file.unlink(missing_ok=True)
