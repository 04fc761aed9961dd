"""Families: each loads its own models, refuses the others by name, and adapts the language model alone by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from PIL import Image
from transformers import BertConfig

from tiny_models import AUDIO as AUDIO_MODELS
from tiny_models import CAUSAL, config, skeleton
from tiny_models import IMAGE_TEXT as IMAGE_TEXT_MODELS
from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.errors import RequestError
from trimtab.models import (
    AUDIO,
    CAUSAL_LM,
    IMAGE_TEXT,
    Family,
    load_model,
    load_processor,
    load_skeleton,
    load_tokenizer,
)
from trimtab.models.adapters import adapter_targets, add_lora, lora_config
from trimtab.models.families import FAMILIES, families_of
from trimtab.models.load import _processor_class
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
OWN = dict.fromkeys(CAUSAL, CAUSAL_LM) | dict.fromkeys(IMAGE_TEXT_MODELS, IMAGE_TEXT)
OWN |= dict.fromkeys(AUDIO_MODELS, AUDIO)
# architecture: language model, tower, connector (None where it has no linear layer)
PLACES: dict[str, tuple[str, str, str | None]] = {
    "llava_onevision": (
        "model.language_model.",
        "model.vision_tower.encoder.",
        "model.multi_modal_projector.",
    ),
    "qwen2_5_vl": ("model.language_model.", "model.visual.blocks.", "model.visual.merger."),
    "qwen3_vl": ("model.language_model.", "model.visual.blocks.", "model.visual.deepstack_merger_list."),
    "idefics3": ("model.text_model.", "model.vision_model.encoder.", "model.connector."),
    "paligemma": ("model.language_model.", "model.vision_tower.encoder.", "model.multi_modal_projector."),
    "gemma3": ("model.language_model.", "model.vision_tower.encoder.", None),
}


def adapted(model_type: str, targets: str | list[str]) -> list[str]:
    model = add_lora(skeleton(model_type), LoraSettings(r=2, targets=targets), OWN[model_type])
    return [n for n, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)]


@pytest.mark.parametrize("model_type", OWN)
def test_a_skeleton_is_of_the_familys_own_class(model_type: str, tmp_path: Path) -> None:
    config(model_type).save_pretrained(tmp_path)
    model = load_skeleton(ModelSettings(name=str(tmp_path)), OWN[model_type])
    assert type(model) is type(skeleton(model_type))
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("model_type", "asked", "own"),
    [
        ("qwen3_vl", CAUSAL_LM, "image-text-to-text model"),
        ("llama", IMAGE_TEXT, "causal language model"),
        ("higgs_audio_v2", CAUSAL_LM, "audio language model"),
        ("gemma3", AUDIO, "causal language models or image-text-to-text models"),
    ],
)
def test_a_model_of_another_family_is_refused_with_the_name_of_its_own(
    model_type: str, asked: Family, own: str, tmp_path: Path
) -> None:
    config(model_type).save_pretrained(tmp_path)
    settings = ModelSettings(name=str(tmp_path))
    for load in (lambda: load_skeleton(settings, asked), lambda: load_model(settings, PLAN, asked)):
        with pytest.raises(RequestError, match=f"{model_type} is no {asked.name}") as refused:
            load()
        assert f"change: choose {asked.wanted}; or a recipe for {own}" in str(refused.value)


def test_a_model_of_no_family(tmp_path: Path) -> None:
    BertConfig(is_decoder=False).save_pretrained(tmp_path)
    for family in (IMAGE_TEXT, AUDIO):
        with pytest.raises(RequestError, match="bert is no"):
            load_skeleton(ModelSettings(name=str(tmp_path)), family)


PICTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # architecture: image processor, its settings, the processor's own
    "llava_onevision": (
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 28]]},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", {}, {}),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", {"patch_size": 16}, {}),
    "idefics3": ("Idefics3ImageProcessorPil", {"do_image_splitting": False}, {}),
}


@pytest.mark.parametrize("model_type", PICTURES)
def test_a_models_own_processor_needs_no_torchvision(model_type: str, tmp_path: Path) -> None:
    name, shape, more = PICTURES[model_type]
    tokenizer = load_tokenizer(ModelSettings())
    placeholder = "<|image_pad|>" if model_type.startswith("qwen") else "<image>"
    tokenizer.add_special_tokens({"additional_special_tokens": [placeholder, "<video>"]})
    config(model_type).save_pretrained(tmp_path)
    made = _processor_class(config(model_type))
    made(getattr(transformers, name)(**shape), tokenizer, **more).save_pretrained(tmp_path)

    processor: Any = load_processor(ModelSettings(name=str(tmp_path)), IMAGE_TEXT)
    assert type(processor.image_processor).__name__ == name
    red = Image.new("RGB", (30, 20), (255, 0, 0))
    batch = processor(images=[red], text=[f"{placeholder} what colour?"], return_tensors="pt")
    image_token = tokenizer.convert_tokens_to_ids(placeholder)
    assert (batch["input_ids"] == image_token).sum() > 1, "one placeholder became one for each patch"
    assert batch["pixel_values"].isfinite().all()
    assert processor.tokenizer.padding_side == "right"


def test_a_causal_models_processor_is_its_tokenizer() -> None:
    assert type(load_processor(ModelSettings(), CAUSAL_LM)) is type(load_tokenizer(ModelSettings()))


def test_gemma_3_is_of_two_families() -> None:
    assert families_of(config("gemma3")) == [CAUSAL_LM, IMAGE_TEXT]
    assert families_of(config("higgs_audio_v2")) == [AUDIO]


def test_each_family_names_what_its_recipe_and_card_need() -> None:
    assert [f.pipeline_tag for f in FAMILIES] == ["text-generation", "image-text-to-text", "text-to-speech"]
    assert [f.samples for f in FAMILIES] == ["text", "image", "audio"]
    for family in FAMILIES:
        assert lora_config(skeleton("llama"), LoraSettings(), family).task_type == family.task_type


def test_the_audio_model_keeps_its_text_head(tmp_path: Path) -> None:
    from transformers import HiggsAudioV2ForConditionalGeneration

    torch.manual_seed(0)
    made = HiggsAudioV2ForConditionalGeneration(config("higgs_audio_v2"), use_text_head=True)
    made.save_pretrained(tmp_path)
    settings = ModelSettings(name=str(tmp_path))
    loaded: Any = load_model(settings, PLAN, AUDIO)
    assert torch.equal(loaded.text_lm_head.weight, made.text_lm_head.weight)
    assert load_skeleton(settings, AUDIO).text_lm_head.weight.shape == made.text_lm_head.weight.shape


def test_an_adapted_audio_model_takes_all_its_arguments() -> None:
    model = add_lora(skeleton("higgs_audio_v2", device="cpu"), LoraSettings(r=2), AUDIO)
    ids = torch.tensor([[5, 6, 100, 100, 100, 7]])
    codes = torch.randint(0, 1026, (1, 3, 4))
    out = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        audio_input_ids=codes,
        audio_input_ids_mask=torch.ones(1, 3, dtype=torch.bool),
        audio_labels=codes,
    )
    out.loss.backward()
    given = {n for n, p in model.named_parameters() if p.grad is not None}
    assert given == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("role", ["attention", "mlp", "all-linear", "q_proj", ["attention", "up_proj"]])
@pytest.mark.parametrize("model_type", PLACES)
def test_roles_and_names_mean_the_language_model(model_type: str, role: str | list[str]) -> None:
    language = PLACES[model_type][0]
    names = adapted(model_type, role)
    alone = {n.split(".layers.")[-1] for n in names}
    assert all(name.startswith(language) for name in names)
    as_text = add_lora(skeleton("llama"), LoraSettings(r=2, targets=role)).get_base_model()
    assert alone == {n.split(".layers.")[-1] for n, m in as_text.named_modules() if isinstance(m, LoraLayer)}


@pytest.mark.parametrize("model_type", PLACES)
def test_tower_and_connector_by_role(model_type: str) -> None:
    _, tower, connector = PLACES[model_type]
    seeing = adapted(model_type, "vision")
    assert seeing
    assert all(name.startswith(tower) for name in seeing)
    if connector is None:
        with pytest.raises(RequestError, match=r"lora\.targets=connector: no layer of Gemma3"):
            adapted(model_type, "connector")
        return
    connecting = adapted(model_type, "connector")
    assert any(name.startswith(connector) for name in connecting)
    assert not set(connecting) & set(seeing)
    both = adapted(model_type, ["attention", "connector", "vision"])
    assert set(both) == {*adapted(model_type, "attention"), *connecting, *seeing}


def test_the_tower_by_name() -> None:
    assert set(adapted("llava_onevision", "vision_tower")) == set(adapted("llava_onevision", "vision"))
    assert adapted("llava_onevision", "linear_1") == ["model.multi_modal_projector.linear_1"]
    named = adapted("llava_onevision", "vision_tower.encoder.layers.0.self_attn.q_proj")
    assert named == ["model.vision_tower.encoder.layers.0.self_attn.q_proj"]
    assert {n.split(".")[-1] for n in adapted("qwen3_vl", "qkv")} == {"qkv"}


def test_endings_stay_short_beside_a_tower() -> None:
    assert adapter_targets(skeleton("llava_onevision"), "attention") == [
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    ]


def test_the_audio_models_blocks_and_heads_by_name() -> None:
    audio = adapted("higgs_audio_v2", "audio_mlp")
    assert {n.split(".", 3)[3] for n in audio} == {f"audio_mlp.{p}_proj" for p in ("gate", "up", "down")}
    both = {n.split(".", 3)[3].split(".")[0] for n in adapted("higgs_audio_v2", "mlp")}
    assert both == {"mlp", "audio_mlp"}
    assert adapted("higgs_audio_v2", "audio_lm_head") == ["audio_lm_head"]
    assert "audio_lm_head" not in adapted("higgs_audio_v2", "all-linear")


@pytest.mark.parametrize("role", ["text_mlp", "audio_mlp", "audio_head"])
@pytest.mark.parametrize("model_type", ["llama", "llava_onevision"])
def test_roles_of_sound_are_refused_where_there_is_none(model_type: str, role: str) -> None:
    with pytest.raises(RequestError, match=f"lora.targets={role}: no layer of") as refused:
        adapted(model_type, role)
    assert ("use `mlp`" if role.endswith("mlp") else "leave `audio_head` out") in str(refused.value)
