"""Adapters by role, in many architectures: what PEFT really adapts is what the role means, and never the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.config.schema import LoraSettings
from trimtab.errors import RequestError
from trimtab.models.adapters import adapter_targets, add_lora, kind_of_layer

COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
GATED = COMMON | {"intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}
PROJECTIONS = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
GATED_MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
FUSED = {"self_attention.query_key_value", "self_attention.dense"}
NEOX_MLP = {"mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}

# model type: shape, linear layers of attention and of the MLP in one decoder layer
ARCHITECTURES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "llama": (GATED, PROJECTIONS, GATED_MLP),
    "mistral": (GATED, PROJECTIONS, GATED_MLP),
    "qwen2": (GATED, PROJECTIONS, GATED_MLP),
    "qwen3": (GATED, PROJECTIONS, GATED_MLP),
    "gemma": (GATED | {"head_dim": 8}, PROJECTIONS, GATED_MLP),
    "gemma2": (GATED | {"head_dim": 8}, PROJECTIONS, GATED_MLP),
    "phi": (
        GATED,
        {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"},
        {"mlp.fc1", "mlp.fc2"},
    ),
    "phi3": (
        GATED,
        {"self_attn.qkv_proj", "self_attn.o_proj"},
        {"mlp.gate_up_proj", "mlp.down_proj"},
    ),
    "gpt2": (GPT, {"attn.c_attn", "attn.c_proj"}, {"mlp.c_fc", "mlp.c_proj"}),
    "gpt_bigcode": (GPT, {"attn.c_attn", "attn.c_proj"}, {"mlp.c_fc", "mlp.c_proj"}),
    "starcoder2": (GATED, PROJECTIONS, {"mlp.c_fc", "mlp.c_proj"}),
    "gptj": (
        GPT | {"rotary_dim": 4},
        {"attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"},
        {"mlp.fc_in", "mlp.fc_out"},
    ),
    "gpt_neox": (
        COMMON | {"intermediate_size": 64},
        {"attention.query_key_value", "attention.dense"},
        NEOX_MLP,
    ),
    "opt": (
        COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32},
        {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"},
        {"fc1", "fc2"},
    ),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}, FUSED, NEOX_MLP),
    "falcon": (COMMON, FUSED, NEOX_MLP),
    "mpt": (
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 100},
        {"attn.Wqkv", "attn.out_proj"},
        {"ffn.up_proj", "ffn.down_proj"},
    ),
}


def skeleton(model_type: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **ARCHITECTURES[model_type][0])
        )


def adapted(model_type: str, targets: str | list[str]) -> set[str]:
    """Names, within their decoder layer, of the modules to which PEFT really added an adapter."""
    model = add_lora(skeleton(model_type), LoraSettings(r=2, targets=targets))
    names = [n for n, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)]
    per_layer: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        assert index is not None, f"{name} lies outside the layers"
        per_layer.setdefault(parts[index], set()).add(".".join(parts[index + 1 :]))
    assert per_layer["0"] == per_layer["1"]
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    return per_layer["0"]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_attention(model_type: str) -> None:
    assert adapted(model_type, "attention") == ARCHITECTURES[model_type][1]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_mlp(model_type: str) -> None:
    assert adapted(model_type, "mlp") == ARCHITECTURES[model_type][2]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_all_linear(model_type: str) -> None:
    _, attention, mlp = ARCHITECTURES[model_type]
    assert adapted(model_type, "all-linear") == attention | mlp


def test_attention_by_uncommon_names() -> None:
    """DeepSeek's latent attention: told by the block the layers lie in. (PEFT has ways of its own with experts.)"""
    shape = GATED | {"num_key_value_heads": 4, "n_routed_experts": 8, "first_k_dense_replace": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **shape))
    expected = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
    assert adapter_targets(model, "attention") == expected


def test_routers_of_experts_are_no_mlp() -> None:
    assert kind_of_layer("model.layers.0.block_sparse_moe.gate") is None
    assert kind_of_layer("model.layers.0.mlp.shared_expert_gate") is None
    assert kind_of_layer("model.layers.0.mlp.experts.3.w1") == "mlp"


def test_targets_are_short_where_that_is_enough() -> None:
    assert adapter_targets(skeleton("llama"), "attention") == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert adapter_targets(skeleton("gpt2"), "attention") == ["attn.c_proj", "c_attn"]
    assert adapter_targets(skeleton("gpt2"), "all-linear") == ["c_attn", "c_fc", "c_proj"]


def test_names() -> None:
    assert adapted("llama", ["q_proj", "mlp.up_proj"]) == {"self_attn.q_proj", "mlp.up_proj"}
    assert adapted("llama", "q_proj") == {"self_attn.q_proj"}
    assert adapted("gpt2", "c_proj") == {"attn.c_proj", "mlp.c_proj"}


def test_roles_and_names_together() -> None:
    assert adapted("llama", ["attention", "up_proj"]) == PROJECTIONS | {"mlp.up_proj"}


def test_a_full_dotted_name_means_that_layer_alone() -> None:
    name = "model.layers.1.self_attn.q_proj"
    model = add_lora(skeleton("llama"), LoraSettings(r=2, targets=[name]))
    assert [n for n, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)] == [name]


def test_the_head_only_by_its_own_name() -> None:
    assert adapter_targets(skeleton("llama"), "lm_head") == ["lm_head"]


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        ("qproj", "qproj"),
        (["q_proj", "c_attn"], "c_attn"),
        (["mlp.q_proj"], "mlp.q_proj"),
        ([], "an empty list"),
    ],
)
def test_a_wrong_name_lists_the_real_ones(targets: str | list[str], missing: str) -> None:
    with pytest.raises(RequestError) as error:
        adapter_targets(skeleton("llama"), targets)
    assert str(error.value).startswith(f"lora.targets: {missing} not found in LlamaForCausalLM\n")
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(error.value)
    assert "attention, mlp, all-linear" in str(error.value)


def test_a_role_that_a_model_does_not_have() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=100)
        )
    with pytest.raises(
        RequestError, match=r"lora\.targets=attention: no layer of MambaForCausalLM has this role"
    ):
        adapter_targets(model, "attention")


def test_adapters_start_as_nothing_and_are_trained_in_fp32() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **GATED)).to(torch.bfloat16).eval()
    tokens = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        before = model(tokens).logits
        tuned = add_lora(model, LoraSettings(r=2))
        assert torch.equal(tuned(tokens).logits, before)
    assert {p.dtype for p in tuned.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in tuned.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_what_peft_refuses_of_the_settings_is_a_request_that_cannot_be_met() -> None:
    """Experts that lie in one tensor take adapters without dropout."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "vocab_size": 100,
    }
    with torch.device("meta"):
        experts = [
            AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **shape)) for _ in "ab"
        ]
    with pytest.raises(RequestError, match=r"(?s)no such adapters.*dropout.*lora\.dropout=0"):
        add_lora(experts[0], LoraSettings(r=2, targets="all-linear", dropout=0.1))
    assert any(parameter.requires_grad for parameter in add_lora(experts[1], LoraSettings(r=2)).parameters())
