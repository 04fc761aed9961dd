"""SHIRG's views around a SigLIP tower: the whole picture pooled, and the best tokens of a foveal crop beside it.

`attach_shirg` gives a model of transformers another way from pixels to tokens and changes nothing else: the same
modules, the same names of weights, the same loss. It never trains, and never chooses a device.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.errors import RequestError
from trimtab.models.shirg_grid import VIEWS, Grid, check_processor, grid_of
from trimtab.models.shirg_processor import shirg_processor
from trimtab.models.shirg_tokens import look

if TYPE_CHECKING:
    from trimtab.config.vision import ShirgSettings

__all__ = ["attach_shirg", "saved_shirg", "shirg_processor"]
_ANYRES = ("pixel_values", "image_sizes", "batch_num_images")
"""What goes into the model's own way from pixels to tokens."""


@dataclass(frozen=True)
class Shirg:
    """What a model with SHIRG's views carries: no weights, so nothing of it is in the state dict."""

    settings: ShirgSettings
    grid: Grid
    forward: Callable[..., Any]
    """The model's own."""
    generate: Callable[..., Any]


def attach_shirg(model: Any, settings: ShirgSettings, processor: Any = None) -> Any:
    """Make `model` take SHIRG's views; the same model is returned. Before adapters, and before any wrapping.

    `model.config.shirg` keeps the settings. A `processor` that is given is checked against the model.

    In training the question is the text before the first label, so that no answer takes part in the choice. Who calls
    the model without labels gives `question_mask` (1 where the question stands); else all text counts.
    """
    if hasattr(model, "peft_config"):
        raise RequestError.of(
            "SHIRG's views were to be attached to a model that has adapters already",
            "the adapters hold the model's own way from pixels to tokens",
            "attach_shirg first, then add the adapters",
        )
    grid = grid_of(settings, model.config)
    if processor is not None:
        check_processor(processor, settings, model.config)
    before: Shirg | None = getattr(model, "shirg", None)
    model.shirg = Shirg(
        settings,
        grid,
        model.forward if before is None else before.forward,
        model.generate if before is None else before.generate,
    )
    model.config.shirg = settings.model_dump()
    model.forward = types.MethodType(_forward(type(model)), model)
    model.generate = types.MethodType(_generate(type(model)), model)
    return model


def saved_shirg(model_config: Any) -> ShirgSettings | None:
    """The settings that a saved model was trained with; None if it has the model's own views."""
    from trimtab.config.vision import ShirgSettings

    kept = getattr(model_config, "shirg", None)
    return None if kept is None else ShirgSettings(**kept)


def _forward(own: type) -> Callable[..., Any]:
    @functools.wraps(own.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, question_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if question_mask is None and labels is not None:
            question_mask = ((labels != -100).cumsum(-1) == 0).long()
        return self.shirg.forward(*args, **_pictures_seen(self, args, kwargs, question_mask))

    return forward


def _generate(own: type) -> Callable[..., Any]:
    @functools.wraps(own.generate)  # type: ignore[attr-defined]
    @torch.no_grad()
    def generate(self: Any, *args: Any, question_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        # transformers would encode the pictures here without the text, and the choice needs the question.
        if "inputs" in kwargs:
            kwargs["input_ids"] = kwargs.pop("inputs")
        return self.shirg.generate(*args, **_pictures_seen(self, args, kwargs, question_mask))

    return generate


def _pictures_seen(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], question_mask: torch.Tensor | None
) -> dict[str, Any]:
    """The arguments of a call with the pictures' tokens in place of their pixels."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    pixels = kwargs.get("pixel_values")
    if pixels is None:
        return kwargs
    ids = args[0] if args else kwargs.get("input_ids")
    embedded: Any = kwargs.get("inputs_embeds")
    _check_views(model.shirg.grid, pixels)
    where = _image_places(model, ids, embedded)
    _check_places(model.shirg.grid, pixels, where)
    question = None
    if model.shirg.settings.similarity:
        text = _question_places(where, kwargs.get("attention_mask"), question_mask)
        with torch.no_grad():
            # The image token may lie outside the vocabulary (PaliGemma), and does not count here.
            words = embedded if ids is None else model.get_input_embeddings()(ids.masked_fill(where, 0))
            question = _mean_question(words, text, where, len(pixels), model.shirg.grid.tokens)
    tokens = look(model.base_model, model.shirg.settings, model.shirg.grid, pixels, question).tokens
    # PaliGemma takes one tensor; the others join a sequence of them.
    taken: Any = tokens if model.config.model_type == "paligemma" else tuple(tokens)
    output = BaseModelOutputWithPooling(pooler_output=taken)
    kept = {name: value for name, value in kwargs.items() if name not in _ANYRES}
    return {**kept, "mm_encoder_outputs": {**(kwargs.get("mm_encoder_outputs") or {}), "image": output}}


def _check_views(grid: Grid, pixels: torch.Tensor) -> None:
    wanted = (VIEWS, 3, grid.size, grid.size)
    if tuple(pixels.shape[1:]) == wanted:
        return
    views = pixels.shape[1] if pixels.dim() == 5 else 1
    high, wide = pixels.shape[-2:]
    raise RequestError.of(
        f"pixel_values of shape {tuple(pixels.shape)}: {views} view{'s' * (views != 1)} a picture of {wide} × {high} "
        f"pixels, and the model expects {VIEWS} views of {grid.size} × {grid.size}",
        "the pictures were prepared by another processor than the model was built for",
        "prepare them with shirg_processor(processor, settings, model.config)",
    )


def _check_places(grid: Grid, pixels: torch.Tensor, where: torch.Tensor) -> None:
    places, wanted = int(where.sum()), len(pixels) * grid.tokens
    if places != wanted:
        raise RequestError.of(
            f"the text has {places} image tokens for {len(pixels)} pictures, and the model puts {wanted} there "
            f"({grid.tokens} a picture)",
            "the text was written by another processor, or it was cut off",
            "use shirg_processor with the model's own shirg settings, and raise data.max_length if rows are cut",
        )


def _image_places(model: Any, ids: torch.Tensor | None, embedded: torch.Tensor | None) -> torch.Tensor:
    """Where the image tokens stand, (rows, length)."""
    token = model.config.image_token_id
    if ids is not None:
        return ids.eq(token)
    if embedded is None:
        raise RequestError.of(
            "the model was called with pictures and without a text",
            "there is no place for their tokens",
            "give input_ids or inputs_embeds",
        )
    own = model.get_input_embeddings()(torch.tensor([token], device=embedded.device))
    same: torch.Tensor = (embedded == own).all(-1)
    return same


def _mean_question(
    words: torch.Tensor, text: torch.Tensor, where: torch.Tensor, pictures: int, tokens: int
) -> torch.Tensor:
    """For each picture the mean embedding of its row's question, (pictures, width); zeros where there is none."""
    chosen = text[..., None].to(words.device)
    mean = (words.float() * chosen).sum(1) / chosen.sum(1).clamp(min=1)
    # The row in which a picture's first token stands, found without asking the device for a number.
    first = torch.arange(pictures, device=where.device) * tokens
    row = torch.searchsorted(where.sum(1).cumsum(0), first, right=True)
    return mean[row.clamp(max=len(words) - 1).to(mean.device)]


def _question_places(
    where: torch.Tensor, attended: torch.Tensor | None, question_mask: torch.Tensor | None
) -> torch.Tensor:
    """Where the question's text stands: what is asked for, without image tokens and padding."""
    text = where.logical_not()
    if attended is not None and attended.dim() == 2:
        text = text & attended.bool()
    return text if question_mask is None else text & question_mask.bool()
