"""A text, spoken by the model that a finished run kept. It trains nothing and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.config.schema import Config
from trimtab.data.clean import BadRow
from trimtab.errors import RequestError, some_of
from trimtab.placement import prepare_process
from trimtab.recipes.kept import alone, kept_model
from trimtab.recipes.planning import plan_run
from trimtab.recipes.recipe import Say
from trimtab.recipes.table import recipe_of

if TYPE_CHECKING:
    from trimtab.data.voice_rows import VoiceRow
    from trimtab.models.spoken import Spoken


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be said, and how it is to sound."""

    text: str
    reference: Path | None = None
    """A clip of the voice."""
    reference_text: str | None = None
    """What is said in it; without it the .txt file beside it is read."""
    speaker: str | None = None
    """Where there is no clip: whose voice of the run's own data it is to be."""
    scene: str | None = None
    seed: int | None = None
    """Where codes are drawn; the run's own without it."""


def speak_run(config: Config, folder: Path, weights: Path, wanted: Wanted, say: Say) -> Spoken:
    """What the run with this config says, whose folder this is and whose adapter or model lies in `weights`."""
    recipe = recipe_of(config)
    if recipe.family.samples != "audio":
        raise RequestError.of(
            f"{folder}: a run with recipe: {config.recipe}",
            "its model writes text, and has no voice",
            "speak with a run of recipe: voice; trimtab ask answers a question in text",
        )
    row = _row(config, wanted, say)
    plan = plan_run(alone(config), refuses=False).plan
    prepare_process(plan)

    from trimtab.data.voice_collate import VoiceCollator
    from trimtab.models.audio_codes import coded
    from trimtab.models.codec import load_run_codec
    from trimtab.models.load import load_model_config, load_tokenizer
    from trimtab.models.speak import speak

    codec = load_run_codec(config, plan, folder)
    tokenizer = load_tokenizer(config.model)
    collator = VoiceCollator(tokenizer, load_model_config(config.model), config.voice, config.data.max_length)
    rows = coded([row], codec, plan, say)
    model = kept_model(recipe, config, plan, weights)
    seed = config.seed if wanted.seed is None else wanted.seed
    return speak(model, collator, codec, rows, plan, config.voice, seed)[0]


def _row(config: Config, wanted: Wanted, say: Say) -> VoiceRow:
    """What is asked, as a row of the data would ask it."""
    from trimtab.data.voice_rows import VoiceRow, checked_text

    try:
        text = checked_text(wanted.text, "--text")
        scene = None if wanted.scene is None else checked_text(wanted.scene, "--scene")
    except BadRow as bad:
        raise RequestError.of(str(bad), "it cannot be said as it stands", "give words to say") from None
    row = VoiceRow(text, None, None, None, scene, wanted.speaker, "--text")
    if wanted.reference is not None:
        _check_heard(wanted.reference, config.voice.silence)
        return _after(row, wanted.reference, wanted.reference_text)
    if wanted.reference_text is not None:
        raise RequestError.of(
            "--reference-text without --reference",
            "it is what the voice says in the reference clip",
            "give the clip with --reference, or leave its text out",
        )
    return row if wanted.speaker is None else _as_speaker(row, config, wanted.speaker, say)


def _check_heard(path: Path, silence: float) -> None:
    """Refuse a clip in which there is no voice, as a row with such a clip is refused."""
    from trimtab.data.sound import loudness, read_sound

    if not path.is_file():
        raise RequestError.of(
            f"--reference {path}: no such file", "there is no voice to sound like", "check the path"
        )
    sound = read_sound(path, f"--reference {path}")
    if (loud := loudness(sound.samples, sound.rate)) < silence:
        raise RequestError.of(
            f"--reference {path}: silent, its loudest tenth of a second has {loud:.0f} dBFS",
            "there is no voice to sound like",
            f"give a clip with a voice; voice.silence={silence:g} says what counts as silent",
        )


def _after(row: VoiceRow, path: Path, words: str | None) -> VoiceRow:
    """The row after this clip, with what is said in it."""
    from trimtab.data.clips import Clip
    from trimtab.data.voice_rows import checked_text

    name, beside = "--reference-text", path.with_suffix(".txt")
    if words is None and beside.is_file():
        name = str(beside)
        try:
            words = beside.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError.of(
                f"{beside}: cannot be read ({error})",
                "the model hears the reference with its words",
                "give them with --reference-text",
            ) from None
    if words is None:
        raise RequestError.of(
            f"--reference {path}: what is said in it is not known",
            f"the model hears the reference with its words, and there is no {beside.name} beside it",
            "give the words with --reference-text",
        )
    try:
        words = checked_text(words, name)
    except BadRow as bad:
        raise RequestError.of(
            str(bad), "the model hears the reference with its words", "give the words that are said in it"
        ) from None
    return replace(row, reference=Clip(path, f"--reference {path}"), reference_text=words)


def _as_speaker(row: VoiceRow, config: Config, speaker: str, say: Say) -> VoiceRow:
    """The row after a clip of this speaker that the run was trained on."""
    from trimtab.data.voice_prepare import prepare_voice

    rows = prepare_voice(config.data, config.voice, config.seed, say).train
    found = next((one for one in rows if one.speaker == speaker), None)
    if found is None:
        known = sorted({one.speaker for one in rows if one.speaker is not None})
        raise RequestError.of(
            f"--speaker {speaker}: no row of {config.data.source} has this speaker",
            f"its speakers are {some_of(known, 12)}" if known else "its rows name no speaker",
            "name one of these, or give a clip with --reference" if known else "give a clip with --reference",
        )
    clip, words = (found.reference, found.reference_text) if found.reference else (found.target, found.text)
    say(f"as {speaker} sounds in {clip.path if clip is not None else found.where}")
    return replace(row, reference=clip, reference_text=words)
