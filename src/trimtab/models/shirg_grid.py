"""What SHIRG's settings come to with a given model: patches, tokens, views. It checks, and computes no picture.

Everything that can be wrong between the settings, the model and its processor is found here, when they are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.config.vision import ShirgSettings

VIEWS = 2
"""The whole picture, then the foveal crop."""
MODELS = ("llava", "llava_onevision", "paligemma")
"""Those whose connector takes each patch by itself, so that any choice of patches can go through it."""
TOWERS = ("siglip_vision_model",)
_SHUFFLE = (
    "its connector folds squares of neighbouring patches into one token (pixel shuffle): single ones cannot"
)
_NATIVE = "its tower takes pictures at their own size, merges 2 × 2 patches and counts positions by that grid: a choice"
_REFUSED = {
    "idefics3": f"{_SHUFFLE} be chosen",
    "smolvlm": f"{_SHUFFLE} be chosen",
    "gemma3": "its connector pools the whole grid to a fixed number of tokens: single patches cannot be chosen",
    "qwen2_vl": f"{_NATIVE} of patches has no place there",
    "qwen2_5_vl": f"{_NATIVE} of patches has no place there",
    "qwen3_vl": f"{_NATIVE} of patches has no place there",
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a picture is cut: sizes in pixels, patches and tokens."""

    size: int
    patch: int
    pool: int
    keep: int

    @property
    def side(self) -> int:
        """Patches along one side of a view."""
        return self.size // self.patch

    @property
    def patches(self) -> int:
        return self.side**2

    @property
    def pooled(self) -> int:
        """Tokens of the whole view."""
        return (self.side // self.pool) ** 2

    @property
    def tokens(self) -> int:
        """Tokens of a picture in the language model."""
        return self.pooled + self.keep


def grid_of(settings: ShirgSettings, model_config: Any) -> Grid:
    """The cut that these settings make with this model; what does not go together is refused."""
    _check_model(model_config)
    patch = model_config.vision_config.patch_size
    grid = Grid(size=settings.size, patch=patch, pool=settings.pool, keep=settings.keep)
    if grid.size % patch:
        below = max(patch, grid.size // patch * patch)
        raise RequestError.of(
            f"shirg.size={grid.size}: the model's tower has patches of {patch} pixels",
            "a view is cut into whole patches",
            f"set shirg.size to a multiple of {patch}, such as {below} or {below + patch}",
        )
    if grid.side % grid.pool:
        fitting = ", ".join(str(n) for n in range(1, grid.side + 1) if grid.side % n == 0)
        raise RequestError.of(
            f"shirg.pool={grid.pool}: a view of {grid.size} pixels has {grid.side} × {grid.side} patches",
            "the whole view is pooled in whole squares",
            f"set shirg.pool to one of {fitting}, or change shirg.size",
        )
    if grid.keep > grid.patches:
        raise RequestError.of(
            f"shirg.keep={grid.keep}: a view of {grid.size} pixels has {grid.patches} patches of {patch} pixels",
            "no more tokens can be kept than there are",
            f"set shirg.keep to {grid.patches} or less, or a larger shirg.size",
        )
    return grid


def _check_model(config: Any) -> None:
    kind = config.model_type
    if kind not in MODELS:
        raise RequestError.of(
            f"vision.views=shirg: the model is {kind}",
            _REFUSED.get(kind, "it is not known to project each patch of a SigLIP tower by itself"),
            f"choose a model of {', '.join(MODELS)}, or vision.views: model",
        )
    tower = config.vision_config.model_type
    if tower not in TOWERS:
        raise RequestError.of(
            f"vision.views=shirg: the {kind} model has a {tower} as its tower",
            "a class token comes before its patches"
            if "clip_vision" in tower and "siglip" not in tower
            else "SHIRG's views need one token for each patch, in raster order, and no other",
            f"choose a model with a SigLIP tower ({', '.join(TOWERS)}), or vision.views: model",
        )


def check_processor(processor: Any, settings: ShirgSettings, model_config: Any) -> None:
    """Refuse a processor that makes other views, or another number of tokens, than the model will expect."""
    grid = grid_of(settings, model_config)
    made: Grid | None = getattr(processor, "shirg_grid", None)
    if made is None:
        raise RequestError.of(
            f"{type(processor).__name__} makes {_own_views(processor)} of a picture, and the model expects {VIEWS}",
            "views and tokens would not match in the first batch",
            "wrap it first: shirg_processor(processor, settings, model.config)",
        )
    if made != grid:
        raise RequestError.of(
            f"the processor makes {VIEWS} views of {made.size} pixels and writes {made.tokens} tokens a picture; "
            f"the model expects {VIEWS} of {grid.size} and {grid.tokens}",
            "they were built from different settings",
            "build both from the same shirg settings and the same model",
        )
    _check_image_token(processor, model_config)


def _check_image_token(processor: Any, model_config: Any) -> None:
    written = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if written != model_config.image_token_id:
        raise RequestError.of(
            f"the processor writes {processor.image_token!r} as token {written} where a picture stands; the model "
            f"looks for token {model_config.image_token_id}",
            "the model would find no place for its picture",
            "take the processor that belongs to the model",
        )


def _own_views(processor: Any) -> str:
    """How many views a model's own processor makes, as a message says it."""
    pictures: Any = getattr(processor, "image_processor", None)
    pinpoints = getattr(pictures, "image_grid_pinpoints", None)
    if not pinpoints:
        return "1 view"
    edge = pictures.size.get("height") or pictures.size.get("shortest_edge")
    most = max((high // edge) * (wide // edge) for high, wide in pinpoints)
    return f"up to {1 + most} views"
