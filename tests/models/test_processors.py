"""Processors of image-text-to-text models: loaded with Pillow alone, whole after a pickle, SmolVLM's without videos."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import SmolVLMImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm

from tiny_processors import FAMILIES, saved_pair, tiny_processor
from trimtab.config.schema import ModelSettings
from trimtab.models import IMAGE_TEXT, load_processor

RED, TALL = Image.new("RGB", (40, 20), (255, 0, 0)), Image.new("RGB", (20, 50), (0, 0, 255))


def asked(processor: Any, pictures: list[list[Image.Image]]) -> dict[str, torch.Tensor]:
    placeholder = getattr(processor, "boi_token", None) or processor.image_token
    texts = [f"{placeholder * len(shown)}what is it?" for shown in pictures]
    return dict(processor(text=texts, images=pictures, return_tensors="pt", padding=True))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_saved_processor_comes_back_without_torchvision_and_through_a_pickle(
    model_type: str, tmp_path: Path
) -> None:
    pictures = [[RED], [TALL, RED]]
    made = asked(tiny_processor(model_type), pictures)
    loaded = load_processor(ModelSettings(name=str(saved_pair(model_type, tmp_path))), IMAGE_TEXT)
    assert same(asked(loaded, pictures), made)
    sent = pickle.loads(pickle.dumps(loaded))
    assert type(sent).__name__ == type(loaded).__name__
    assert sent.chat_template == loaded.chat_template
    assert same(asked(sent, pictures), made)


def test_smolvlm_without_videos_prepares_pictures_as_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own class asks for a package that spells numbers, for videos; the texts of pictures need none."""
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    ours = tiny_processor("smolvlm")

    class Pictures(processing_smolvlm.SmolVLMProcessor):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    assert isinstance(ours.image_processor, SmolVLMImageProcessorPil)
    own = Pictures(ours.image_processor, ours.tokenizer, None, image_seq_len=1)
    for pictures in ([[RED]], [[RED, TALL], [TALL]]):
        assert same(asked(ours, pictures), asked(own, pictures))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_no_processor_asks_for_videos_where_torchvision_is_installed(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part for videos would be told to use Pillow, which it cannot, and the whole would not load."""
    folder = saved_pair(model_type, tmp_path)
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: True)
    loaded: Any = load_processor(ModelSettings(name=str(folder)), IMAGE_TEXT)
    assert not hasattr(loaded, "video_processor")
    assert same(asked(loaded, [[RED]]), asked(tiny_processor(model_type), [[RED]]))
