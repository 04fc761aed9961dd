"""The tower takes part in batches without pictures: the same parameters are reached, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from picture_rows import drawn, question
from tiny_models import skeleton
from tiny_processors import FAMILIES, tiny_pair, tiny_processor
from tiny_shirg import SMALL
from trimtab.config.schema import LoraSettings
from trimtab.data.picture_collate import PictureCollator
from trimtab.errors import RequestError
from trimtab.models import IMAGE_TEXT
from trimtab.models.adapters import add_lora
from trimtab.models.diffusion import MaskedDiffusion
from trimtab.models.outputs import nothing_of
from trimtab.models.shirg import attach_shirg
from trimtab.models.shirg_processor import shirg_processor
from trimtab.models.take_part import smallest_picture, take_part

# Gemma 3's connector is one parameter and no linear layer.
TARGETS = {name: ["all-linear", "vision"] + ["connector"] * (name != "gemma3") for name in FAMILIES}
TEXT = [question("How many bars are there?", "three"), question("Which colour?", "the circle is red")]
PICTURES = [question("Which colour?", "red", drawn())]


def lora(model: Any, targets: str | list[str]) -> Any:
    torch.manual_seed(0)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    adapted = add_lora(model, LoraSettings(r=2, targets=targets), IMAGE_TEXT)
    # lora_B starts as noughts, and would keep every other gradient at nought.
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted.train()


def pair(model_type: str) -> tuple[Any, Any]:
    """A model with adapters everywhere, and its processor."""
    model, processor = tiny_pair(model_type)
    return lora(model, TARGETS[model_type]), processor


def gradients(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_text_batch_reaches_what_a_picture_batch_reaches(model_type: str, checkpointing: bool) -> None:
    model, processor = pair(model_type)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    collate = PictureCollator(processor)
    reaches(model, processor, collate(TEXT), collate(PICTURES))


@pytest.mark.parametrize("model_type", ["llava_onevision", "paligemma"])
def test_shirgs_views(model_type: str) -> None:
    """Its two views go through the tower by a method of its own, which chooses among their tokens."""
    model, own = tiny_pair(model_type)
    attach_shirg(model, SMALL)
    processor = shirg_processor(own, SMALL, model.config)
    collate = PictureCollator(processor)
    reaches(lora(model, TARGETS[model_type]), processor, collate(TEXT), collate(PICTURES))


def reaches(model: Any, processor: Any, text: dict[str, Any], pictures: dict[str, Any]) -> None:
    before = gradients(model, text)
    loss = model(**text).loss.item()
    unused = [name for name, gradient in before.items() if gradient is None]
    assert any("lora" in name for name in unused), "without it the tower is left out"

    part = take_part(model, processor)
    assert model(**text).loss.item() == loss, "nothing is added to the outputs"
    after = gradients(model, text)
    reached = {name for name, gradient in after.items() if gradient is not None}
    assert reached == {name for name, gradient in gradients(model, pictures).items() if gradient is not None}
    # LLaVA's last layer of the tower is used by no picture either.
    assert reached & set(unused)
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
    model, processor = pair(model_type)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    take_part(model, processor)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, PictureCollator(processor)(TEXT))
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())


def test_full_tuning_reaches_the_connectors_own_tensors() -> None:
    """LLaVA-OneVision's image_newline is a parameter of no module; its tower's last layer is not used at all."""
    model, processor = tiny_pair("llava_onevision")
    model.config.vision_feature_layer = -2
    take_part(model, processor)
    collate = PictureCollator(processor)
    text, pictures = gradients(model.train(), collate(TEXT)), gradients(model, collate(PICTURES))
    assert {n for n, g in text.items() if g is None} == {n for n, g in pictures.items() if g is None}
    assert text["model.image_newline"] is not None
    assert text["model.vision_tower.encoder.layers.2.mlp.fc1.weight"] is None


@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava_onevision"])
def test_masked_diffusion(model_type: str) -> None:
    """There both halves of a doubled batch share what the tower gave, and the loss is computed from the logits."""
    model, processor = pair(model_type)
    take_part(model, processor)
    objective = MaskedDiffusion(model, mask_id=5, end_id=6, seed=0)
    masked = objective.inputs(PictureCollator(processor)(TEXT), 0)
    with objective.pictures_once():
        loss, _ = objective.loss(model(**masked.inputs).logits, masked.targets, None)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def runs_of(model: Any, tower: str) -> list[int]:
    runs: list[int] = []
    model.get_base_model().get_submodule(tower).register_forward_hook(lambda *_: runs.append(1))
    return runs


def test_a_tower_that_nobody_trains_is_not_run() -> None:
    made, processor = tiny_pair("qwen3_vl")
    model = lora(made, "attention")
    take_part(model, processor)
    runs = runs_of(model, "model.visual")
    for _ in range(3):
        gradients(model, PictureCollator(processor)(TEXT))
    assert len(runs) == 1, "the first time shows that nothing there is trained"


def test_neither_evaluation_nor_a_picture_runs_the_tower_again() -> None:
    model, processor = pair("paligemma")
    take_part(model, processor)
    collate, runs = PictureCollator(processor), runs_of(model, "model.vision_tower")
    with torch.no_grad():
        model(**collate(TEXT))
    assert len(runs) == 0
    model(**collate(PICTURES))
    assert len(runs) == 1
    model(**collate(TEXT))
    assert len(runs) == 2


def test_the_sum_of_nothing_is_nought_also_of_infinities() -> None:
    features = torch.tensor([1.0, float("inf"), float("nan")], requires_grad=True)
    nought = nothing_of(features)
    nought.backward()
    assert nought.item() == 0.0
    assert features.grad is not None
    assert features.grad.tolist() == [0.0, 0.0, 0.0]


def test_the_small_picture_never_stands_for_a_rows_own() -> None:
    """Image tokens without pictures give what they gave."""
    model, processor = pair("qwen3_vl")
    batch = PictureCollator(processor)(TEXT)
    batch["input_ids"][0, 3] = model.config.image_token_id
    before = model(**batch).logits
    take_part(model, processor)
    assert torch.equal(model(**batch).logits, before)


def test_a_model_that_embeds_elsewhere_is_refused() -> None:
    model, processor = pair("idefics3")
    take_part(model, processor)
    with pytest.raises(RuntimeError, match="give it input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 32), attention_mask=torch.ones(1, 4, dtype=torch.long))


def test_a_model_without_image_features_is_refused() -> None:
    with pytest.raises(RequestError, match="LlamaForCausalLM has no get_image_features"):
        take_part(skeleton("llama", "cpu"), tiny_processor("paligemma"))


def test_one_view_of_a_picture_is_enough() -> None:
    """A processor that cuts pictures into many views is asked for one."""
    processor = tiny_processor("idefics3")
    assert processor.image_processor.do_image_splitting
    assert smallest_picture(processor)["pixel_values"].shape == (1, 1, 3, 28, 28)
