"""The settings of `recipe: voice`, their defaults, and what must hold between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trimtab.config.facts import is_given
from trimtab.config.rule import Rules
from trimtab.config.section import Default, RecipeSection

if TYPE_CHECKING:
    from trimtab.config.schema import Config

RULES = Rules()
MODEL, DATA = "tiny-voice", "espeak-voices"
"""The built-in model that speaks, and the clips that come with Trimtab."""
SPECTRAL = "spectral"
"""The codec that is learned from the clips at hand."""


class VoiceSettings(RecipeSection):
    """Higgs Audio v2, tuned on clips with their words, after a clip of the same voice; used with `recipe: voice`."""

    recipe = "voice"
    without_effect = (
        *("data.format", "data.packing", "data.train_on"),
        *("training.group_by_length", "samples.prompts", "samples.max_new_tokens", "samples.held_out"),
    )
    rules = RULES

    codec: str | None = None
    """What turns sound into codes: null takes the model's own tokenizer model, `spectral` one that is learned from the
    clips at hand and needs no download; or a folder or hub id of a HiggsAudioV2TokenizerModel."""

    system: str = "Generate audio following instruction."
    """What the system's turn says."""

    scene: str | None = None
    """How it sounds where a row says nothing of that itself, such as `Audio is recorded from a quiet room.`"""

    check_clips: bool = True
    """Hear every clip before the first step: a broken, silent, clipped, too short or too long one is found then."""

    min_seconds: Annotated[float, Field(gt=0)] = 0.2
    """A shorter clip is a bad row."""

    max_seconds: Annotated[float, Field(gt=0)] = 30.0
    """A longer clip is a bad row; also where a generated clip is cut off that does not end by itself."""

    silence: Annotated[float, Field(lt=0)] = -60.0
    """A clip whose loudest tenth of a second is below this many decibels of full scale is a bad row."""

    clipping: Annotated[float, Field(gt=0, le=1)] = 0.02
    """A clip with more than this share of its samples at full scale is a bad row."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """How freely codes are drawn when it speaks: 0 always takes the likeliest; null as the model's own settings say."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Codes are drawn from the likeliest that make up this share; null as the model's own settings say."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """Codes are drawn from this many likeliest; null as the model's own settings say."""

    show: Annotated[int, Field(ge=0)] = 4
    """Clips that the run speaks before and after training and keeps, for the report."""

    def defaults(self, config: Config) -> list[Default]:
        shipped = config.data.source == DATA or not is_given(config, "data.source")
        built_in = config.model.name == MODEL or not is_given(config, "model.name")
        return [
            Default("model.name", MODEL, "the built-in model that speaks, made from its seed"),
            Default("data.source", DATA, "clips that come with Trimtab"),
            Default("data.bad_rows", "stop", "a broken clip is named; data.bad_rows: drop counts such rows"),
            *(
                [Default("voice.codec", SPECTRAL, "the built-in model has no codec of its own")]
                if built_in
                else []
            ),
            *([] if shipped else [Default("data.max_length", 2048, "each second of sound takes 25 tokens")]),
        ]


RULES.blame(
    "voice.min_seconds voice.max_seconds",
    lambda c: c.voice.min_seconds >= c.voice.max_seconds,
    "leaves no length for a clip: it has {c.voice.min_seconds} seconds at least and {c.voice.max_seconds} at most",
    "set voice.min_seconds below voice.max_seconds",
)
