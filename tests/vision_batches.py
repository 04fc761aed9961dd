"""Batches for the tiny image-text models: with pictures and without, by each architecture's own image processor."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from trimtab.models.take_part import smallest_picture

IMAGE_TOKEN = 100
SQUARE = {"size": {"height": 28, "width": 28}}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava_onevision": ("LlavaOnevisionImageProcessorPil", {**SQUARE, "image_grid_pinpoints": [[28, 28]]}),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", {"patch_size": 14}),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", {"patch_size": 16}),
    "idefics3": (
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}},
    ),
    "paligemma": ("SiglipImageProcessorPil", SQUARE),
    "gemma3": ("Gemma3ImageProcessorPil", SQUARE),
}
# Their masks are made of what is a picture and what is text.
TYPED = {"paligemma": "token_type_ids", "gemma3": "token_type_ids"}
QWEN = ("qwen2_5_vl", "qwen3_vl")


def picture_processor(model_type: str) -> Any:
    name, settings = PROCESSORS[model_type]
    return getattr(transformers, name)(**settings)


def text_batch(model_type: str, rows: int = 2, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """Rows of text alone, trained on their second half."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 90, (rows, length), generator=generator)
    return _batch(model_type, tokens)


def picture_batch(model_type: str, processor: Any, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """One row with one small picture before its text."""
    from tiny_models import skeleton

    pictures = smallest_picture(processor)
    model = skeleton(model_type, "cpu")
    taken = {k: v for k, v in pictures.items() if k in ("pixel_values", "image_grid_thw", "image_sizes")}
    with torch.no_grad():
        features = model.get_image_features(**taken).pooler_output
    count = sum(part.shape[:-1].numel() for part in features)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(5, 90, (1, length), generator=generator)
    start = torch.full((1, 1), 102)
    tokens = torch.cat([start, torch.full((1, count), IMAGE_TOKEN), text], dim=1)
    return _batch(model_type, tokens) | pictures


def _batch(model_type: str, tokens: torch.Tensor) -> dict[str, Any]:
    labels = tokens.clone()
    labels[:, : -tokens.shape[1] // 2] = -100
    labels[tokens == IMAGE_TOKEN] = -100
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    if model_type in TYPED:
        batch[TYPED[model_type]] = (tokens == IMAGE_TOKEN).long()
    if model_type in QWEN:
        batch["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    return batch
