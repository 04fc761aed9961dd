"""Tiny models, with eyes and without, and rows with answers for them: what the tests of masked diffusion share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tiny_models import IMAGE_TEXT, SIGLIP, TEXT, config
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")

IMAGE, END, MASK, PAD = 100, 2, 3, 0
LLAVA = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **SIGLIP},
    "image_token_index": IMAGE,
    "vision_feature_select_strategy": "full",
}
TEXT_ONLY = {
    "llama": TEXT,
    "qwen2": TEXT,
    "qwen3": {**TEXT, "head_dim": 8},
    "gemma3_text": {**TEXT, "head_dim": 8, "sliding_window": 4},
}
SEEING = ("llava", *IMAGE_TEXT)


def text_model(model_type: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **TEXT_ONLY[model_type])
    return AutoModelForCausalLM.from_config(made, attn_implementation=attention).eval()


def seeing_model(model_type: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    made = AutoConfig.for_model("llava", **LLAVA) if model_type == "llava" else config(model_type)
    model = AutoModelForImageTextToText.from_config(made, attn_implementation=attention).eval()
    with torch.no_grad():  # the usual start makes every picture look alike
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.normal_(std=0.15)
    return model


def padded(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Questions and answers as a collator makes a batch of them."""
    width = max(len(q) + len(a) for q, a in rows)
    fill = [width - len(q) - len(a) for q, a in rows]
    return {
        "input_ids": torch.tensor([q + a + [PAD] * n for (q, a), n in zip(rows, fill, strict=True)]),
        "attention_mask": torch.tensor(
            [[1] * (len(q) + len(a)) + [0] * n for (q, a), n in zip(rows, fill, strict=True)]
        ),
        "labels": torch.tensor(
            [[-100] * len(q) + a + [-100] * n for (q, a), n in zip(rows, fill, strict=True)]
        ),
    }


ROWS = [([5, 6, 7], [20, 21, 22, END]), ([8, 9], [23, END])]


def seen_batch(model: Any) -> dict[str, Any]:
    """Two rows with a picture of their own each, as the model's own processor would lay them out."""
    kind, draw = model.config.model_type, torch.Generator().manual_seed(1)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    seen: dict[str, Any]
    if kind.startswith("qwen"):
        side = model.config.vision_config.patch_size
        seen = {"pixel_values": pixels(32, 6 * side * side), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        tokens = 4
    elif kind == "llava_onevision":
        seen = {"pixel_values": pixels(2, 2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]] * 2)}
        tokens = sum(map(len, model.get_image_features(**seen).pooler_output)) // 2
    elif kind == "idefics3":
        seen, tokens = {"pixel_values": pixels(2, 1, 3, 28, 28)}, 1
    else:
        seen, tokens = {"pixel_values": pixels(2, 3, 28, 28)}, 4
    batch = padded([([q[0]] + [IMAGE] * tokens + q[1:], a) for q, a in ROWS])
    is_image = (batch["input_ids"] == IMAGE).long()
    if kind.startswith("qwen"):
        seen["mm_token_type_ids"] = is_image
    elif kind == "gemma3":
        seen["token_type_ids"] = is_image
    elif kind == "paligemma":
        seen["token_type_ids"] = batch["labels"].ne(-100).long()
    return {**batch, **seen}
