"""Tiny models with SHIRG's views, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tiny_models import SIGLIP, TEXT, skeleton
from trimtab.config.vision import ShirgSettings
from trimtab.models.shirg import attach_shirg

IMAGE = 100
SMALL = ShirgSettings(size=56, crop=56, keep=9)
"""With the tiny tower's patches of 14: 4 × 4 patches a view, 4 + 9 = 13 tokens a picture."""
TOKENS = 13


def model_of(kind: str, settings: ShirgSettings = SMALL, seed: int = 1, **tower: Any) -> Any:
    """A random model with SHIRG's views."""
    torch.manual_seed(seed)
    if kind == "llava":
        made = AutoConfig.for_model(
            "llava",
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "siglip_vision_model", **SIGLIP, **tower},
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
        )
        model = AutoModelForImageTextToText.from_config(made)
    else:
        model = skeleton(kind, "cpu")
    return attach_shirg(model.eval(), settings)


def batch_of(
    rows: int = 2, pictures: int = 1, seed: int = 0, answer: int = 3, views: int = 2
) -> dict[str, Any]:
    """Rows of one word, their pictures, four words of a question and an answer."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 99, (rows, 1 + 4 + answer), generator=generator)
    places = torch.full((rows, pictures * TOKENS), IMAGE)
    ids = torch.cat([words[:, :1], places, words[:, 1:]], 1)
    labels = ids.clone()
    labels[:, : ids.shape[1] - answer] = -100
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "pixel_values": torch.randn(rows * pictures, views, 3, 56, 56, generator=generator),
    }
