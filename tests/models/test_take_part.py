"""The tower takes part in batches without pictures: the same parameters are reached, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tiny_models import IMAGE_TEXT as MODELS
from tiny_models import config, skeleton
from trimtab.config.schema import LoraSettings
from trimtab.errors import RequestError
from trimtab.models import IMAGE_TEXT
from trimtab.models.adapters import add_lora
from trimtab.models.outputs import nothing_of
from trimtab.models.take_part import smallest_picture, take_part
from vision_batches import IMAGE_TOKEN, picture_batch, picture_processor, text_batch

TARGETS = {name: ["all-linear", "vision"] + ["connector"] * (name != "gemma3") for name in MODELS}


def adapted(model_type: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = add_lora(skeleton(model_type, "cpu"), LoraSettings(r=2, targets=TARGETS[model_type]), IMAGE_TEXT)
    # lora_B starts as noughts, and would keep every other gradient at nought.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def gradients(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_text_batch_reaches_what_a_picture_batch_reaches(model_type: str, checkpointing: bool) -> None:
    model = adapted(model_type)
    processor = picture_processor(model_type)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    pictures, text = picture_batch(model_type, processor), text_batch(model_type)

    before = gradients(model, text)
    loss = model(**text).loss.item()
    unused = [name for name, gradient in before.items() if gradient is None]
    assert any("lora" in name for name in unused), "without it the tower is left out"

    part = take_part(model, processor)
    assert model(**text).loss.item() == loss, "nothing is added to the outputs"
    after = gradients(model, text)
    reached = {name for name, gradient in after.items() if gradient is not None}
    assert reached == {name for name, gradient in gradients(model, pictures).items() if gradient is not None}
    assert {name.split(".lora_")[0] for name in unused} <= {name.split(".lora_")[0] for name in reached}
    for name, gradient in after.items():
        if name in unused:
            assert gradient is None or not gradient.any(), name
        else:
            assert gradient is not None
            assert torch.allclose(gradient, before[name], atol=1e-7), name

    part.remove()
    assert [name for name, gradient in gradients(model, text).items() if gradient is None] == unused


@pytest.mark.parametrize("model_type", ["llava_onevision", "qwen3_vl"])
def test_under_autocast_with_half_weights(model_type: str) -> None:
    """As bf16 runs are: base weights in bf16, adapters in fp32, the forward pass under autocast."""
    model = adapted(model_type)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    take_part(model, picture_processor(model_type))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, text_batch(model_type))
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())


def test_full_tuning_reaches_the_connectors_own_tensors() -> None:
    """LLaVA-OneVision's image_newline is a parameter of no module; its tower's last layer is not used at all."""
    model = skeleton("llava_onevision", "cpu", vision_feature_layer=-2)
    processor = picture_processor("llava_onevision")
    take_part(model, processor)
    text = gradients(model, text_batch("llava_onevision"))
    pictures = gradients(model, picture_batch("llava_onevision", processor))
    assert {n for n, g in text.items() if g is None} == {n for n, g in pictures.items() if g is None}
    assert text["model.image_newline"] is not None
    assert text["model.vision_tower.encoder.layers.2.mlp.fc1.weight"] is None


def test_a_tower_that_nobody_trains_is_not_run() -> None:
    torch.manual_seed(0)
    model = add_lora(skeleton("qwen3_vl", "cpu"), LoraSettings(r=2, targets="attention"), IMAGE_TEXT)
    take_part(model, picture_processor("qwen3_vl"))
    runs: list[int] = []
    model.get_base_model().model.visual.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(3):
        gradients(model, text_batch("qwen3_vl"))
    assert len(runs) == 1, "the first time shows that nothing there is trained"


def test_neither_evaluation_nor_a_picture_runs_the_tower_again() -> None:
    model = adapted("paligemma")
    processor = picture_processor("paligemma")
    take_part(model, processor)
    runs: list[int] = []
    model.get_base_model().model.vision_tower.register_forward_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        model(**text_batch("paligemma"))
    assert len(runs) == 0
    model(**picture_batch("paligemma", processor))
    assert len(runs) == 1
    model(**text_batch("paligemma"))
    assert len(runs) == 2


def test_the_sum_of_nothing_is_nought_also_of_infinities() -> None:
    features = torch.tensor([1.0, float("inf"), float("nan")], requires_grad=True)
    nought = nothing_of(features)
    nought.backward()
    assert nought.item() == 0.0
    assert features.grad is not None
    assert features.grad.tolist() == [0.0, 0.0, 0.0]


def test_image_tokens_without_pictures_are_still_the_models_to_judge() -> None:
    """The small picture is nobody's: its features never stand where a row asks for a picture."""
    model = adapted("qwen3_vl")
    batch = text_batch("qwen3_vl")
    batch["input_ids"][0, 3] = IMAGE_TOKEN
    before = model(**batch).logits
    take_part(model, picture_processor("qwen3_vl"))
    assert torch.equal(model(**batch).logits, before)


def test_a_model_that_embeds_elsewhere_is_refused() -> None:
    model = adapted("idefics3")
    take_part(model, picture_processor("idefics3"))
    embedded = torch.zeros(1, 4, 32)
    with pytest.raises(RuntimeError, match="give it input_ids"):
        model(inputs_embeds=embedded, attention_mask=torch.ones(1, 4, dtype=torch.long))


def test_a_model_without_image_features_is_refused() -> None:
    with pytest.raises(RequestError, match="LlamaForCausalLM has no get_image_features"):
        take_part(skeleton("llama", "cpu"), picture_processor("paligemma"))


def test_one_view_of_a_picture_is_enough() -> None:
    """A processor that cuts pictures into many views is asked for one."""
    pictures = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 28}
    )
    assert pictures.do_image_splitting
    assert smallest_picture(pictures)["pixel_values"].shape == (1, 1, 3, 28, 28)
    assert config("idefics3").vision_config.image_size == 28
