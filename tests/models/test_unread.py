"""What is frozen is what no backward pass reaches, and nothing else."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from tiny_models import config
from tiny_processors import tiny_pair
from trimtab.models.unread import freeze_unread


@pytest.mark.parametrize("model_type", ["llava", "llava_onevision"])
@pytest.mark.parametrize("layer", [-1, -2, [1, -3]])
def test_what_is_frozen_is_what_no_gradient_reaches(model_type: str, layer: int | list[int]) -> None:
    model, processor = tiny_pair(model_type)
    changed = model.config
    changed.vision_feature_layer = layer
    torch.manual_seed(0)
    model = type(model)(changed)
    picture = Image.new("RGB", (28, 28), (200, 30, 60))
    batch = processor(text=[f"{processor.image_token}what is it?"], images=[[picture]], return_tensors="pt")
    model(**batch).logits.float().square().mean().backward()
    unreached = {name for name, tensor in model.named_parameters() if tensor.grad is None}
    named = set(freeze_unread(model))
    assert named == unreached
    assert {name for name, tensor in model.named_parameters() if not tensor.requires_grad} == unreached
    assert unreached


@pytest.mark.parametrize("model_type", ["paligemma", "qwen3_vl", "idefics3"])
def test_models_that_take_no_layer_by_number_are_left_alone(model_type: str) -> None:
    model, _ = tiny_pair(model_type)
    assert getattr(config(model_type), "vision_feature_layer", None) is None
    assert freeze_unread(model) == []
    assert all(tensor.requires_grad for tensor in model.parameters())
