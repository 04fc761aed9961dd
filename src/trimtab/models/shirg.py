"""SHIRG's views around a SigLIP tower: the whole picture pooled, and the best tokens of a foveal crop beside it.

`attach_shirg` gives a model of transformers another way from pixels to tokens and changes nothing else: the same
modules, the same names of weights, the same loss. It never trains, and never chooses a device.
"""

from __future__ import annotations

import functools
import inspect
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
    if hasattr(model, "shirg"):
        raise RequestError.of(
            "SHIRG's views were to be attached to a model that has them already",
            "it would be asked for its own way from pixels to tokens, which is no longer there",
            "load the model again, and attach them once",
        )
    inner = model.base_model
    if hasattr(inner, "image_newline"):
        # LLaVA-OneVision puts it between the rows of its own grids of views, and SHIRG's views have none.
        inner.image_newline.requires_grad_(False)
    model.shirg = inner.shirg = Shirg(settings, grid, model.forward, model.generate)
    model.config.shirg = settings.model_dump()
    inner.get_image_features = types.MethodType(_features(type(inner).get_image_features), inner)
    model.get_image_features = types.MethodType(_outer_features(type(model).get_image_features), model)
    model.forward = types.MethodType(_forward(type(model).forward), model)
    model.generate = types.MethodType(_generate(type(model).generate), model)
    return model


def saved_shirg(model_config: Any) -> ShirgSettings | None:
    """The settings that a saved model was trained with; None if it has the model's own views."""
    from trimtab.config.vision import ShirgSettings

    kept = getattr(model_config, "shirg", None)
    return None if kept is None else ShirgSettings(**kept)


def _features(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get_image_features(
        self: Any, pixel_values: torch.Tensor, *_: Any, question: torch.Tensor | None = None, **__: Any
    ) -> Any:
        """`question`: the mean embedding of each picture's question; without it no token is closer to it."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        _check_views(self.shirg.grid, pixel_values)
        tokens = look(self, self.shirg.settings, self.shirg.grid, pixel_values, question).tokens
        # PaliGemma takes one tensor; the others join a sequence of them.
        taken: Any = tokens if self.config.model_type == "paligemma" else tuple(tokens)
        return BaseModelOutputWithPooling(pooler_output=taken)

    return get_image_features


def _outer_features(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get_image_features(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The model's own asks for the sizes of pictures (LLaVA-OneVision), which SHIRG's views do not have.
        return self.base_model.get_image_features(*args, **kwargs)

    return get_image_features


def _forward(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, question_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if question_mask is None and labels is not None:
            question_mask = question_places(labels)
        return self.shirg.forward(*args, **_pictures_seen(self, args, kwargs, question_mask))

    known = inspect.signature(own)
    asked = inspect.Parameter("question_mask", inspect.Parameter.KEYWORD_ONLY, default=None)
    named = [one for one in known.parameters.values() if one.kind is not one.VAR_KEYWORD]
    rest = [one for one in known.parameters.values() if one.kind is one.VAR_KEYWORD]
    # Who asks what the model takes finds the question's mask too.
    forward.__signature__ = known.replace(parameters=[*named, asked, *rest])  # type: ignore[attr-defined]
    return forward


def _generate(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    @torch.no_grad()
    def generate(self: Any, *args: Any, question_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        # transformers would encode the pictures here without the text, and the choice needs the question.
        if "inputs" in kwargs:
            kwargs["input_ids"] = kwargs.pop("inputs")
        return self.shirg.generate(*args, **_pictures_seen(self, args, kwargs, question_mask))

    return generate


def question_places(labels: torch.Tensor) -> torch.Tensor:
    """1 before the first label of each row: what an answer will not be part of, however much of it is known."""
    return (labels.ne(-100).cumsum(-1) == 0).long()


def _pictures_seen(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], question_mask: torch.Tensor | None
) -> dict[str, Any]:
    """The arguments of a call with the pictures' tokens in place of their pixels."""
    pixels = kwargs.get("pixel_values")
    if pixels is None:
        return kwargs
    ids = args[0] if args else kwargs.get("input_ids")
    embedded: Any = kwargs.get("inputs_embeds")
    where = _image_places(model, ids, embedded)
    question = None
    if model.shirg.settings.similarity:
        text = _question_text(where, kwargs.get("attention_mask"), question_mask)
        with torch.no_grad():
            if ids is not None:
                # Past the module's hooks, which wait for the pass itself. The image token may lie outside the
                # vocabulary (PaliGemma), and does not count here.
                embedded = model.get_input_embeddings().forward(ids.masked_fill(where, 0))
            question = _mean_question(embedded, text, where, len(pixels), model.shirg.grid.tokens)
    # By the method that models of transformers have for it, where others look for it too.
    output = model.base_model.get_image_features(pixel_values=pixels, question=question)
    _check_places(model.shirg.grid, len(output.pooler_output), where)
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


def _check_places(grid: Grid, pictures: int, where: torch.Tensor) -> None:
    places, wanted = int(where.sum()), pictures * grid.tokens
    if places != wanted:
        raise RequestError.of(
            f"the text has {places} image tokens for {pictures} pictures, and the model puts {wanted} there "
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


def _question_text(
    where: torch.Tensor, attended: torch.Tensor | None, question_mask: torch.Tensor | None
) -> torch.Tensor:
    """Where the question's text stands: what is asked for, without image tokens and padding."""
    text = where.logical_not()
    if attended is not None and attended.dim() == 2:
        text = text & attended.bool()
    return text if question_mask is None else text & question_mask.bool()
