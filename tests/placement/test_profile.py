"""What the planner knows of a model: its parts, their sizes, what they need on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.config.schema import LoraSettings
from trimtab.models.adapters import add_lora
from trimtab.placement import ModelProfile, Workload, profile_model
from trimtab.placement.profile import bare_model

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
SMALL = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 100}
OUTSIDE = {
    "llama": (
        SHAPE | {"intermediate_size": 64},
        ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"],
    ),
    "gpt2": (
        SMALL,
        ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.ln_f", "lm_head"],
    ),
    "opt": (
        SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32},
        [
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            "model.decoder.final_layer_norm",
            "lm_head",
        ],
    ),
    "bloom": (
        {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 100},
        [
            "transformer.word_embeddings",
            "transformer.word_embeddings_layernorm",
            "transformer.ln_f",
            "lm_head",
        ],
    ),
}


def skeleton(model_type: str, **shape: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))


def llama(**changes: Any) -> Any:
    return skeleton("llama", **(SHAPE | {"intermediate_size": 64} | changes))


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_parts_cover_every_parameter_and_buffer(model_type: str) -> None:
    shape, outside = OUTSIDE[model_type]
    model = skeleton(model_type, **shape)
    profile = profile_model(model)
    assert [part.name for part in profile.parts if not part.is_layer] == outside
    assert len(profile.layers) == 3
    assert profile.parameters == sum(p.numel() for p in model.parameters())
    assert profile.trainable == profile.parameters
    names = [part.name for part in profile.parts]
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        assert sum(name.startswith(part + ".") for part in names) == 1, name
    assert (profile.hidden, profile.vocabulary) == (32, 100)


@pytest.mark.parametrize(
    ("model_type", "shape", "widths"),
    [
        # One figure a layer, as a list.
        (
            "gemma3n_text",
            {"intermediate_size": [64, 96, 64, 64, 64], "head_dim": 8, "num_key_value_heads": 2},
            (96, 8 * (4 + 4)),
        ),
        # A head of its own width in the layers of full attention.
        (
            "gemma4_text",
            {"intermediate_size": 64, "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2},
            (64, 16 * (4 + 4)),
        ),
    ],
)
def test_where_layers_differ_the_widest_counts(
    model_type: str, shape: dict[str, Any], widths: tuple[int, int]
) -> None:
    small = {"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    profile = profile_model(skeleton(model_type, **(SHAPE | {"num_hidden_layers": 5} | small | shape)))
    assert (profile.intermediate, profile.attention) == widths
    assert len(profile.layers) == 5


def test_adapters_are_counted_with_their_layers() -> None:
    profile = profile_model(add_lora(llama(), LoraSettings(r=4, targets="attention")))
    assert [part.name for part in profile.layers] == [f"model.layers.{i}" for i in range(3)]
    each = 4 * 4 * (32 + 32)
    assert [part.trainable for part in profile.layers] == [each] * 3
    assert profile.trainable == 3 * each
    assert profile.parameters == profile_model(llama()).parameters + 3 * each


def test_a_tied_head_is_counted_once() -> None:
    tied, untied = profile_model(llama(tie_word_embeddings=True)), profile_model(llama())
    assert untied.parameters - tied.parameters == 32 * 100
    assert "lm_head" in [part.name for part in tied.parts], "it still needs a device"


class Expert(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))


class Mixture(nn.Module):
    """More experts in a layer than layers, and a longer but lighter tower beside the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(1, 1) for _ in range(7))
        self.layers = nn.ModuleList(Expert(5) for _ in range(2))
        self.head = nn.Linear(4, 2)


def test_the_stack_is_the_heaviest_list() -> None:
    profile = profile_model(Mixture())
    assert [part.name for part in profile.layers] == ["layers.0", "layers.1"]
    assert [part.name for part in profile.parts if not part.is_layer] == ["tower", "head"]


def test_a_model_without_a_stack_is_one_part() -> None:
    profile = profile_model(nn.Linear(3, 2))
    assert [(part.name, part.parameters, part.is_layer) for part in profile.parts] == [("", 8, False)]


def test_the_bare_model_inside_its_wrappers() -> None:
    model = llama()
    assert bare_model(nn.DataParallel(add_lora(model, LoraSettings()))) is model
    assert bare_model(model) is model
    compiled = torch.compile(nn.Linear(2, 2))
    assert type(bare_model(compiled)) is nn.Linear


def needs(profile: ModelProfile, weights: Any = "bf16", compute: Any = "bf16", **work: Any) -> Any:
    shards = work.pop("shards", 1)
    return profile.share(profile.parts, weights, compute, Workload(**work), capacity=2**40, shards=shards)


def test_weights_gradients_and_optimizer_by_number_format() -> None:
    profile = profile_model(add_lora(llama(), LoraSettings(r=4, targets="attention")))
    frozen, trained = profile.parameters - profile.trainable, profile.trainable
    share = needs(profile)
    assert share.weights == 2 * frozen + 4 * trained
    assert share.gradients == 4 * trained
    assert share.optimizer == 8 * trained
    assert needs(profile, "fp32", "fp32").weights == 4 * (frozen + trained)
    assert share.needed == share.weights + share.gradients + share.optimizer + share.activations


def test_inference_needs_no_training_state() -> None:
    share = needs(profile_model(llama()), training=False)
    assert share.gradients == share.optimizer == 0
    assert share.activations < needs(profile_model(llama())).activations


def test_what_makes_activations_grow_and_shrink() -> None:
    profile = profile_model(llama())
    one = needs(profile).activations
    assert needs(profile, batch_size=2).activations > one
    assert needs(profile, max_length=4096).activations > one
    assert needs(profile, gradient_checkpointing=True).activations < one
    assert needs(profile, compute="fp32").activations > one


def test_full_tuning_in_bf16_pays_for_the_copies_that_autocast_makes() -> None:
    full, frozen = profile_model(llama()), profile_model(llama().requires_grad_(False))
    assert needs(full, "fp32").activations - needs(frozen, "fp32").activations == 2 * full.parameters
    assert needs(full, "fp32", "fp32").activations == needs(frozen, "fp32", "fp32").activations


def test_shards_divide_the_state_but_not_the_activations() -> None:
    profile = profile_model(llama())
    whole, half = needs(profile), needs(profile, shards=2)
    assert half.weights == whole.weights // 2
    assert half.optimizer == whole.optimizer // 2
    gathered = 2 * 2 * max(part.parameters for part in profile.parts)
    assert half.activations == whole.activations - profile.trainable + gathered


def test_a_device_without_layers_has_no_activations_of_layers() -> None:
    profile = profile_model(llama())
    outside = [part for part in profile.parts if not part.is_layer]
    work = Workload(gradient_checkpointing=True)
    share = profile.share(outside, "bf16", "fp32", work, capacity=0)
    assert share.activations == 3 * 4 * 256 * 100
