"""A preset has the published number of parameters; so it has the published shape."""

from __future__ import annotations

import pytest

from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.models import AUDIO, CAUSAL_LM, load_skeleton
from trimtab.models.adapters import add_lora
from trimtab.models.presets import PRESETS, preset_config
from trimtab.placement import profile_model

# Published as "3.6B LLM + 2.2B audio adapter": Llama 3.2 3B with a head of its own for the text; and for sound, in each
# layer an MLP and two norms, beside them the codes' embedding and head.
TEXT_HALF = 3_212_749_824 + 128_256 * 3_072
AUDIO_HALF = 28 * (3 * 3_072 * 8_192 + 2 * 3_072) + 2 * 8 * 1_026 * 3_072
HIGGS_AUDIO = TEXT_HALF + AUDIO_HALF
PUBLISHED = {
    "smollm2": 134_515_008,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": 1_100_048_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "bosonai/higgs-audio-v2-generation-3B-base": HIGGS_AUDIO,
    "eustlb/higgs-audio-v2-generation-3B-base": HIGGS_AUDIO,
}


def test_every_preset_is_published() -> None:
    own = {"tiny-vision", "tiny-voice"}  # Trimtab's, held to their folders by tests of their own
    assert {name.lower() for name in PUBLISHED} == set(PRESETS) - own


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    model = load_skeleton(ModelSettings(name=name), AUDIO if "higgs" in name else CAUSAL_LM)
    assert all(p.device.type == "meta" for p in model.parameters())
    profile = profile_model(model)
    assert profile.parameters == sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    assert len(profile.layers) == model.config.num_hidden_layers


def test_higgs_audio_is_as_large_as_it_is_said_to_be() -> None:
    assert f"{TEXT_HALF / 1e9:.1f} {AUDIO_HALF / 1e9:.1f} {HIGGS_AUDIO / 1e9:.1f}" == "3.6 2.2 5.8"


def test_tinyllama_with_lora_on_attention() -> None:
    model = add_lora(
        load_skeleton(ModelSettings(name="TinyLlama/TinyLlama-1.1B-Chat-v1.0")),
        LoraSettings(r=32, targets="attention"),
    )
    profile = profile_model(model)
    assert profile.trainable == 9_011_200
    assert f"{100 * profile.trainable / profile.parameters:.2f}" == "0.81"


def test_a_name_that_is_no_preset() -> None:
    assert preset_config("someone/some-model") is None
