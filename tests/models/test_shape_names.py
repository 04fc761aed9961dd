"""Models of which only the shape is known: of the size that they stand for, fed with nothing fetched, never trained."""

from __future__ import annotations

import pytest
from PIL import Image

from trimtab.config.schema import ModelSettings
from trimtab.config.vision import ShirgSettings
from trimtab.errors import RequestError
from trimtab.models.families import AUDIO, IMAGE_TEXT
from trimtab.models.load import load_model, load_model_config, load_processor, load_skeleton, load_tokenizer
from trimtab.models.shape_names import HIGGS_3B, IMAGE_ID, LLAVA_8B, VOICE_TOKENS, is_shape
from trimtab.models.shirg import shirg_processor
from trimtab.placement import PlacementPlan

SETTINGS = ModelSettings(name=LLAVA_8B)
SIGLIP_SO400M = 412_987_248
"""Its 27 layers, embeddings and last norm, without the pooling head."""
LLAMA_3_8B = 8_030_261_248
CONNECTOR = 1152 * 4096 + 4096 + 4096 * 4096 + 4096


def test_it_has_the_size_of_its_parts() -> None:
    model = load_skeleton(SETTINGS, IMAGE_TEXT)
    assert sum(p.numel() for p in model.parameters()) == SIGLIP_SO400M + CONNECTOR + LLAMA_3_8B


def test_its_processor_writes_a_place_for_every_token_of_a_picture() -> None:
    processor = load_processor(SETTINGS, IMAGE_TEXT)
    config = load_model_config(SETTINGS)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many bars?"}]}]
    words = processor.apply_chat_template(asked, add_generation_prompt=True)
    for feeding, tokens, shape in (
        (processor, 27 * 27, (1, 3, 384, 384)),
        (shirg_processor(processor, ShirgSettings(), config), 980, (1, 2, 3, 448, 448)),
    ):
        batch = feeding(text=[words], images=[[Image.new("RGB", (640, 480))]], return_tensors="pt")
        assert int((batch["input_ids"] == IMAGE_ID).sum()) == tokens
        assert tuple(batch["pixel_values"].shape) == shape
        assert int(batch["input_ids"].max()) < config.text_config.vocab_size


def test_a_voice_of_the_published_size_whose_tokens_are_where_its_config_says() -> None:
    settings = ModelSettings(name=HIGGS_3B)
    model = load_skeleton(settings, AUDIO)
    released = load_skeleton(ModelSettings(name="bosonai/higgs-audio-v2-generation-3B-base"), AUDIO)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in released.named_parameters()
    }
    config, tokenizer = load_model_config(settings), load_tokenizer(settings)
    ids = tokenizer.convert_tokens_to_ids(list(VOICE_TOKENS))
    assert ids[:3] == [config.audio_token_id, config.audio_bos_token_id, config.audio_delay_token_id]
    assert ids[6] == config.eos_token_id
    assert tokenizer("".join(VOICE_TOKENS), add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.pad_token_id == config.pad_token_id
    assert max(ids) < config.vocab_size


def test_it_is_not_trained() -> None:
    plan = PlacementPlan(
        device="cpu",
        precision="fp32",
        scaler=False,
        weight_precision="fp32",
        trainable_precision="fp32",
        strategy="single",
        device_map=None,
        processes=1,
        reasons={},
    )
    with pytest.raises(RequestError, match="without weights"):
        load_model(SETTINGS, plan, IMAGE_TEXT)
    assert not is_shape("smollm2")
