"""What is frozen is what no backward pass reaches, and nothing else."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tiny_models import config
from tiny_processors import tiny_pair
from trimtab.config.schema import LoraSettings
from trimtab.models.adapters import add_lora
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


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_what_chooses_tokens_gets_neither_gradient_nor_adapter(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    model = _sparse(model_type)
    torch.manual_seed(0)
    model(input_ids=torch.arange(2, 12)[None]).logits.float().square().mean().backward()
    reached = {name for name, tensor in model.named_parameters() if tensor.grad is not None}
    named = set(freeze_unread(model))
    assert named
    assert named.isdisjoint(reached)
    assert all(".indexer." in name for name in named)
    assert any(".indexer." in name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    adapted = add_lora(_sparse(model_type), LoraSettings(r=2))
    assert not [
        name for name, tensor in adapted.named_parameters() if tensor.requires_grad and "indexer" in name
    ]


def _sparse(model_type: str) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    parts = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
    index = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    config = AutoConfig.for_model(
        model_type, **sizes, **heads, **parts, **index, **experts, topk_group=1, first_k_dense_replace=1
    )
    return AutoModelForCausalLM.from_config(config)
