"""Adapters by role and layer range: what PEFT really adapts, in every family, and again after a reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from tiny_models import IMAGE_TEXT, SIGLIP, TEXT, skeleton
from trimtab.config.schema import LoraSettings
from trimtab.errors import RequestError
from trimtab.models.adapters import adapter_targets, add_lora
from trimtab.models.targets import Target
from trimtab.recipes.plan_text import _targets as shown

SEED = ["vision:0-3:q_proj,k_proj,v_proj", "vision:4-5:q_proj,k_proj", "connector", "attention:16-31"]
TOWER = {
    "llava_onevision": "model.vision_tower.encoder.layers",
    "qwen2_5_vl": "model.visual.blocks",
    "qwen3_vl": "model.visual.blocks",
    "idefics3": "model.vision_model.encoder.layers",
    "paligemma": "model.vision_tower.encoder.layers",
    "gemma3": "model.vision_tower.encoder.layers",
}


def adapted(model: Any, *targets: str, r: int = 2) -> list[str]:
    tuned = add_lora(model, LoraSettings(r=r, targets=list(targets)))
    return [n for n, m in tuned.get_base_model().named_modules() if isinstance(m, LoraLayer)]


def numbers(names: list[str], stack: str) -> set[int]:
    return {int(name.removeprefix(stack + ".").split(".")[0]) for name in names if name.startswith(stack)}


class Tower(nn.Module):
    """As LLaVA's own code has it: a wrapper named vision_tower around a model that wraps another."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.vision_tower = nn.Module()
        self.vision_tower.vision_model = SiglipVisionModel(config)


def old_llava(text: dict[str, Any], vision: dict[str, Any], head: bool = False) -> Any:
    """Tower and connector inside the module that holds the language model's embeddings and layers."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**text))
        config = SiglipVisionConfig(vision_use_head=head, **vision)
        model.model.vision_tower = Tower(config)
        wide, hidden = config.hidden_size, text["hidden_size"]
        model.model.mm_projector = nn.Sequential(
            nn.Linear(wide, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
    return model


@pytest.mark.parametrize("model_type", IMAGE_TEXT)
def test_ranges_in_every_family(model_type: str) -> None:
    tower, language = (
        TOWER[model_type],
        "model.text_model" if model_type == "idefics3" else "model.language_model",
    )
    names = adapted(skeleton(model_type), "vision:1-", "attention:0-1", "mlp:3")
    assert all(name.startswith((tower, language)) for name in names)
    assert numbers(names, tower) == {1, 2}
    layers = f"{language}.layers"
    assert numbers([n for n in names if "self_attn" in n], layers) == {0, 1}
    assert numbers([n for n in names if ".mlp." in n and n.startswith(layers)], layers) == {3}
    whole = adapted(skeleton(model_type), "vision")
    assert [n for n in names if n.startswith(tower)] == [n for n in whole if not n.startswith(f"{tower}.0.")]


def test_names_in_a_range() -> None:
    assert adapted(skeleton("qwen3_vl"), "vision:0:qkv") == ["model.visual.blocks.0.attn.qkv"]
    layer = "model.language_model.layers.2.self_attn"
    names = adapted(skeleton("llava_onevision"), "all-linear:2:q_proj,self_attn.v_proj")
    assert sorted(names) == [f"{layer}.q_proj", f"{layer}.v_proj"]
    assert len(adapted(skeleton("llava_onevision"), "q_proj:0-2")) == 3
    assert len(adapted(skeleton("llava_onevision"), "all-linear:0-1:mlp")) == 6


def test_layer_1_is_not_layer_11() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TEXT | {"num_hidden_layers": 12}))
    assert numbers(adapted(model, "attention:1"), "model.layers") == {1}


@pytest.mark.parametrize("head", [False, True], ids=["bare tower", "with a pooling head"])
def test_a_tower_inside_the_language_model_under_a_doubled_name(head: bool) -> None:
    tower = "model.vision_tower.vision_tower.vision_model.encoder.layers"
    names = adapted(old_llava(TEXT, SIGLIP, head), "vision:0-1:q_proj,k_proj", "connector", "attention:2-")
    assert {n for n in names if n.startswith(tower)} == {
        f"{tower}.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "k_proj")
    }
    assert numbers(names, "model.layers") == {2, 3}
    assert {n for n in names if "projector" in n} == {"model.mm_projector.0", "model.mm_projector.2"}
    assert len(names) == 4 + 8 + 2
    assert not any("vision" in n for n in adapted(old_llava(TEXT, SIGLIP, head), "all-linear"))


def test_the_seeds_adapter_has_three_million_parameters() -> None:
    """SigLIP so400m, a projector to 4096, r 64: 16 x 147,456 + 64 x (1152 + 4096) + 64 x (4096 + 4096)."""
    so400m = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
    }
    text = TEXT | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    tuned = add_lora(old_llava(text, so400m), LoraSettings(r=64, alpha=128, targets=SEED[:3]))
    trained = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    assert trained == 16 * 147_456 + 64 * (1152 + 4096) + 64 * (4096 + 4096) == 3_219_456
    tuned = add_lora(old_llava(text, so400m), LoraSettings(r=64, alpha=128, targets=SEED))
    with_language = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    assert with_language == trained + 16 * 4 * 64 * (4096 + 4096)


@pytest.mark.parametrize("model_type", ["llava_onevision", "qwen3_vl", "idefics3"])
@pytest.mark.parametrize("layers", [4, 12], ids=["few targets", "so many that PEFT shortens the list"])
def test_plain_peft_reloads_the_same_modules(model_type: str, layers: int, tmp_path: Path) -> None:
    text = IMAGE_TEXT[model_type]["text_config"] | {"num_hidden_layers": layers}
    targets = ["vision:0-1", "connector", f"all-linear:1-{layers - 2}"]
    tuned = add_lora(skeleton(model_type, "cpu", text_config=text), LoraSettings(r=2, targets=targets))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    tuned.save_pretrained(tmp_path)
    assert isinstance(LoraConfig.from_pretrained(tmp_path), LoraConfig)
    again = PeftModel.from_pretrained(skeleton(model_type, "cpu", text_config=text), tmp_path)
    before = {n: p for n, p in tuned.named_parameters() if ".lora_" in n}
    after = {n: p for n, p in again.named_parameters() if ".lora_" in n}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("vision:0-3", "model.vision_tower.encoder.layers has 3 layers, 0-2"),
        ("attention:4-", "model.language_model.layers has 4 layers, 0-3"),
        ("attention:2-1", "the last layer comes before the first"),
        ("vision:0-2:qq_proj", "qq_proj not found in these layers"),
        ("connector:0", "connector has no numbered layers"),
        ("vision:-4", "cannot be read"),
        ("vision:", "cannot be read"),
        ("vision:a-b", "cannot be read"),
        ("vision:0:q_proj:x", "cannot be read"),
        ("vision:0:", "cannot be read"),
        (":0-3", "cannot be read"),
        ("visoin:0-3", "visoin not found in LlavaOnevision"),
    ],
)
def test_what_cannot_be_met_is_said(target: str, said: str) -> None:
    with pytest.raises(RequestError, match=said.replace(".", r"\.")) as error:
        adapter_targets(skeleton("llava_onevision"), [target])
    assert "change:" in str(error.value)


def test_two_stacks_for_one_role_are_told_apart_by_name() -> None:
    model = old_llava(TEXT, SIGLIP)
    with torch.device("meta"):
        model.model.second_tower = Tower(SiglipVisionConfig(vision_use_head=False, **SIGLIP))
    with pytest.raises(RequestError, match=r"vision has layers in 2 stacks") as error:
        adapter_targets(model, ["vision:0-1"])
    assert "second_tower" in str(error.value)
    names = adapted(model, "second_tower:0-1")
    assert numbers(names, "model.second_tower.vision_tower.vision_model.encoder.layers") == {0, 1}
    assert len(names) == 12


def test_a_connector_that_is_a_bare_tensor() -> None:
    with pytest.raises(RequestError, match=r"model\.multi_modal_projector\.mm_input_projection_weight"):
        adapter_targets(skeleton("gemma3"), ["connector"])


def test_an_entry_is_read() -> None:
    assert Target.read("vision") == Target("vision", "vision")
    assert Target.read("vision:3") == Target("vision:3", "vision", 3, 3)
    assert Target.read("vision:3-") == Target("vision:3-", "vision", 3, None)
    assert Target.read("vision: 0-3: a, b").names == ("a", "b")


def test_the_plan_tells_ranges_as_ranges() -> None:
    assert shown(("a.0.q", "a.1.q", "a.3.q", "k_proj", "mm.0")) == "a.[0-1, 3].q, k_proj, mm.0"
