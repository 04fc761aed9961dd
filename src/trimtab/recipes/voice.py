"""A voice: Higgs Audio v2, tuned on clips and their words, that speaks a text as a reference clip sounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.config.schema import Config, VoiceSettings
from trimtab.models.families import AUDIO
from trimtab.placement import PlacementPlan
from trimtab.recipes.fullest_rows import Fullest
from trimtab.recipes.outcomes import held_out_loss
from trimtab.recipes.recipe import Job, Need, Prepared, Recipe, Say, rows_at_once
from trimtab.recipes.voice_look import asks, keep_codec, look
from trimtab.recipes.voice_takes import again, takes

if TYPE_CHECKING:
    from trimtab.data.voice_collate import VoiceCollator
    from trimtab.recipes.trainer_driver import TrainerDriver


class Heard(NamedTuple):
    """What this recipe alone goes on with."""

    collator: VoiceCollator
    codec: Any


def _need(config: Config) -> Need:
    return Need(
        {"training.batch_size": config.training.batch_size, "data.max_length": config.data.max_length},
        "weights, gradients, optimizer and activations of text and audio layers",
        [
            "halve training.batch_size and double training.gradient_accumulation_steps",
            "set training.gradient_checkpointing=true",
            "lower data.max_length: each second of sound takes 25 tokens",
        ],
    )


def _prepare(config: Config, plan: PlacementPlan, say: Say) -> Prepared:
    from trimtab.data.voice_collate import VoiceCollator
    from trimtab.data.voice_prepare import prepare_voice
    from trimtab.models.audio_codes import coded
    from trimtab.models.codec import codec_for
    from trimtab.models.load import load_model_config, load_tokenizer

    tokenizer = load_tokenizer(config.model)
    collator = VoiceCollator(tokenizer, load_model_config(config.model), config.voice, config.data.max_length)
    data = prepare_voice(config.data, config.voice, config.seed, say)
    codec = codec_for(config, plan, data.train, say)
    train, held = (coded(rows, codec, plan, say) for rows in (data.train, data.eval or []))
    train, held = collator.fitting(train, held, config.data, data.report)
    for line in data.report.lines():
        say(line)
    heard = Heard(collator, codec)
    return Prepared(
        tokenizer, train, held or None, data.report, own=heard, length=lambda row: len(collator.made(row).ids)
    )


def _fullest(config: Config, number: int) -> Fullest:
    """Rows of a short text, spoken for as long as a row may be."""
    import torch

    from trimtab.data.voice_collate import CodedRow, VoiceCollator
    from trimtab.data.voice_rows import VoiceRow
    from trimtab.models.load import load_model_config, load_tokenizer

    tokenizer = load_tokenizer(config.model)
    collator = VoiceCollator(tokenizer, load_model_config(config.model), config.voice, config.data.max_length)
    spoken = VoiceRow("a", None, None, None, None, None, "a row of full length")

    def row(frames: int) -> CodedRow:
        return CodedRow(spoken, None, torch.zeros(frames, collator.marks.codebooks, dtype=torch.long))

    longest = collator.most or config.data.max_length
    full = row(max(longest - collator.length(row(1)) + 1, 1))
    prepared = Prepared(tokenizer, [full] * number, None, None, own=Heard(collator, None))
    size = config.training.batch_size
    return Fullest(prepared, f"{size} row{'s' * (size > 1)} of {collator.length(full):,} tokens")


def _fit(config: Config, model: Any) -> None:
    from trimtab.models.voice_loss import teach_voice

    teach_voice(model)


def _build(job: Job) -> TrainerDriver:
    from transformers import TrainingArguments

    from trimtab.models.load import left_out
    from trimtab.models.voice_places import PlacedVoices
    from trimtab.placement import bare_model
    from trimtab.recipes.trainer_driver import TrainerDriver, trainer_arguments
    from trimtab.recipes.voice_trainer import VoiceTrainer

    prepared = job.prepared
    for line in left_out(job.model, AUDIO):
        job.say(f"! {line}")
    arguments = TrainingArguments(
        **trainer_arguments(job.config, job.plan, job.run, evaluates=bool(prepared.eval), model=job.model),
        # Rows are codes and words until the collator has read them.
        remove_unused_columns=False,
        label_names=["labels"],
        prediction_loss_only=True,
    )
    collator = PlacedVoices(prepared.own.collator, bare_model(job.model).config)
    return TrainerDriver(job, VoiceTrainer, arguments, data_collator=collator)


def _outcome(job: Job, driver: TrainerDriver) -> dict[str, Any]:
    if driver.main and not driver.ended_early:
        keep_codec(job)
    return held_out_loss(job, driver)


VOICE = Recipe(
    name="voice",
    settings=VoiceSettings,
    words=lambda config: "voice cloning",
    workload=rows_at_once,
    need=_need,
    prepare=_prepare,
    build=_build,
    outcome=_outcome,
    family=AUDIO,
    fit=_fit,
    asks=asks,
    looked_at=lambda config: {"show": config.voice.show},
    look=look,
    answer=None,
    again=again,
    takes=takes,
    fullest=_fullest,
)
