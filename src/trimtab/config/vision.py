"""The settings of `recipe: vision` and of SHIRG's views, their defaults, and what must hold between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trimtab.config.facts import evaluates, is_given, unused
from trimtab.config.rule import Conflict, Rules
from trimtab.config.section import Default, RecipeSection, Section

if TYPE_CHECKING:
    from trimtab.config.schema import Config

RULES = Rules()
MODEL, DATA = "tiny-vision", "drawn-pictures"
"""The built-in model that sees, and the pictures that Trimtab draws itself."""
Weight = Annotated[float, Field(ge=0.0)]


class ShirgSettings(Section):
    """Two views of a picture, of which the sharper one keeps its best tokens; used with `vision.views: shirg`."""

    size: Annotated[int, Field(ge=8)] = 448
    """Both views are this many pixels wide and high."""

    crop: Annotated[int, Field(ge=8)] = 448
    """Side of the square that the foveal view takes, in pixels of the picture; its shorter side at most."""

    centre_x: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Where the foveal view looks: 0 at the left edge, 1 at the right."""

    centre_y: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Where the foveal view looks: 0 at the upper edge, 1 at the lower."""

    pool: Annotated[int, Field(ge=1)] = 2
    """The whole view's tokens are averaged in squares of this side."""

    keep: Annotated[int, Field(ge=1)] = 724
    """Tokens of the foveal view that the language model gets."""

    attention: Weight = 0.4
    """Weight of the attention that a token is paid by the tower."""

    similarity: Weight = 0.25
    """Weight of a token's likeness to the question."""

    edges: Weight = 0.25
    """Weight of the edges under a token."""

    distance: Weight = 0.1
    """Weight of how far a token is from all the others."""

    radial: Literal["none", "inward", "outward"] = "none"
    """Whether tokens count more near the middle, or far from it."""

    radial_sigma: Annotated[float, Field(gt=0)] = 0.65
    """How fast that falls: 1 is half the view's side."""

    noise: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Tokens come last whose attention (0 to 1) deviates more than this between the tower's heads, or its layers."""

    merge: Annotated[float, Field(gt=-1, lt=1)] | None = None
    """Tokens with this cosine or more to a better one are averaged into it; the next best take their places."""

    token_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the kept foveal tokens that is zeroed in training."""


class VisionSettings(RecipeSection):
    """A language model that sees, tuned on pictures with questions and answers; used with `recipe: vision`."""

    recipe = "vision"
    without_effect = (
        *("data.format", "data.packing", "data.train_on"),
        *("training.group_by_length", "samples.prompts"),
    )
    rules = RULES

    objective: Literal["causal", "masked_diffusion"] = "causal"
    """Learn the next token, or (LaViDa's way) the masked ones among all tokens of the answer."""

    dataset: Literal["chartqa", "infovqa", "ocrvqa", "docvqa", "textvqa", "ai2d", "vqav2"] | None = None
    """The set that `data.source` is a copy of; null: a hub id says it by itself, and own data by its columns."""

    metric: Literal["exact", "relaxed", "anls", "soft"] | None = None
    """How an answer is scored; null takes the set's own, and for own data `exact`."""

    check_pictures: bool = True
    """Open every picture before the first step, so that a broken one is found then."""

    max_pixels: Annotated[int, Field(ge=1)] = 64_000_000
    """A picture that claims more pixels is refused before it is unpacked."""

    views: Literal["model", "shirg"] = "model"
    """How a picture becomes tokens: the model's own way, or SHIRG's two views."""

    mask_token: str | None = None
    """masked_diffusion: the token that stands for a masked one; null takes the tokenizer's own."""

    answer_length: Annotated[int, Field(ge=1)] = 32
    """masked_diffusion: tokens of an answer; a shorter one is filled with end-of-sequence tokens."""

    unmask_steps: Annotated[int, Field(ge=1)] | None = None
    """masked_diffusion: passes in which an answer is unmasked; null takes one for each token."""

    show: Annotated[int, Field(ge=0)] = 8
    """Held-out pictures that the run keeps with their questions and answers, for the report."""

    def defaults(self, config: Config) -> list[Default]:
        counted = "answers are counted on held-out pictures before and after"
        drawn = config.data.source == DATA or not is_given(config, "data.source")
        return [
            Default("model.name", MODEL, "the built-in model that sees, made from its seed"),
            Default("data.source", DATA, "pictures that Trimtab draws itself"),
            Default(
                "data.bad_rows", "stop", "a broken picture is named; data.bad_rows: drop counts such rows"
            ),
            *(
                []
                if drawn
                else [Default("data.max_length", 2048, "a picture alone takes hundreds of tokens")]
            ),
            *([Default("samples.held_out", 100, counted)] if evaluates(config) else []),
            Default("samples.max_new_tokens", 32, "answers about pictures are short"),
            *(
                [
                    Default(
                        "vision.answer_length",
                        3,
                        "drawn pictures are answered in one word or two, and an end",
                    )
                ]
                if drawn and self.objective == "masked_diffusion"
                else []
            ),
        ]


@RULES.reading("vision.views")
def _views_unused(config: Config) -> Conflict | None:
    if config.vision.views == "shirg":
        return None
    return unused(config, [f"shirg.{leaf}" for leaf in ShirgSettings.model_fields], "vision.views: model")


@RULES.reading("vision.objective")
def _diffusion_unused(config: Config) -> Conflict | None:
    if config.vision.objective == "masked_diffusion":
        return None
    leaves = ("mask_token", "answer_length", "unmask_steps")
    return unused(config, [f"vision.{leaf}" for leaf in leaves], "vision.objective: causal")


RULES.blame(
    "shirg.attention shirg.similarity shirg.edges shirg.distance vision.views",
    lambda c: (
        c.vision.views == "shirg"
        and not c.shirg.attention + c.shirg.similarity + c.shirg.edges + c.shirg.distance
    ),
    "is 0, and so are the other weights: nothing says which tokens to keep",
    "give one of shirg.attention, shirg.similarity, shirg.edges, shirg.distance a weight",
)
RULES.blame(
    "vision.unmask_steps vision.answer_length",
    lambda c: c.vision.unmask_steps is not None and c.vision.unmask_steps > c.vision.answer_length,
    "is over vision.answer_length ({c.vision.answer_length}): each pass unmasks one token at least",
    "set it to {c.vision.answer_length} or less",
)
