"""Models of several stacks: vision towers and codecs beside a language model, placed whole block by whole block."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModel

from tiny_models import AUDIO, CAUSAL, IMAGE_TEXT, batch, skeleton
from trimtab import virtual_gpus
from trimtab.config.schema import LoraSettings
from trimtab.models.adapters import add_lora
from trimtab.placement import (
    ModelProfile,
    PlacementPlan,
    Workload,
    move,
    place,
    profile_model,
    return_outputs,
    verify,
)
from trimtab.placement.balance import balanced_map
from trimtab.placement.profile import CUDA_CONTEXT_BYTES
from trimtab.placement.stacks import layer_classes

MODELS = [*CAUSAL, *IMAGE_TEXT, *AUDIO]
# architecture: layers of the tower, the module that the language model is
TOWERS = {
    "llava_onevision": ("model.vision_tower.encoder.layers", "model.language_model"),
    "qwen2_5_vl": ("model.visual.blocks", "model.language_model"),
    "qwen3_vl": ("model.visual.blocks", "model.language_model"),
    "idefics3": ("model.vision_model.encoder.layers", "model.text_model"),
    "paligemma": ("model.vision_tower.encoder.layers", "model.language_model"),
    "gemma3": ("model.vision_tower.encoder.layers", "model.language_model"),
}
CODEC = {
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "hidden_size": 16, "codebook_dim": 4},
    "mimi": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_filters": 4,
        "upsample_groups": 32,
        "codebook_size": 16,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
    },
}


@cache
def codec(model_type: str) -> Any:
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model(model_type, **CODEC[model_type]))


@cache
def profiled(model_type: str) -> tuple[Any, ModelProfile]:
    model = codec(model_type) if model_type in CODEC else skeleton(model_type)
    return model, profile_model(model)


def spread(profile: ModelProfile, *sizes: int, work: Workload | None = None) -> tuple[dict[str, str], Any]:
    """On GPUs with this much room for the model itself."""
    capacities = {f"cuda:{i}": CUDA_CONTEXT_BYTES + size for i, size in enumerate(sizes)}
    return balanced_map(profile, "cuda:0", capacities, "fp32", "fp32", work or Workload(max_length=16))


@pytest.mark.parametrize("model_type", TOWERS)
def test_the_tower_and_the_language_model_are_both_stacks(model_type: str) -> None:
    _, profile = profiled(model_type)
    tower, language = TOWERS[model_type]
    names = [f"{tower}.{i}" for i in range(3)] + [f"{language}.layers.{i}" for i in range(4)]
    assert [part.name for part in profile.layers] == names, "what sees comes first"
    assert [part.stack for part in profile.layers] == [tower] * 3 + [""] * 4
    assert list(profile.towers) == [tower]
    vision = profiled(model_type)[0].config.vision_config
    assert (profile.towers[tower].hidden, profile.towers[tower].intermediate) == (vision.hidden_size, 40)
    assert (profile.hidden, profile.intermediate, profile.vocabulary) == (32, 48, 128)


@pytest.mark.parametrize("model_type", [*MODELS, *CODEC])
def test_every_tensor_lies_in_one_part(model_type: str) -> None:
    model, profile = profiled(model_type)
    names = [part.name for part in profile.parts]
    assert len(names) == len(set(names))
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        assert sum(name == part or name.startswith(part + ".") for part in names) == 1, name
    assert profile.parameters == profile.trainable == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model_type", [*MODELS, *CODEC])
def test_what_must_stay_whole_is_in_one_part(model_type: str) -> None:
    model, profile = profiled(model_type)
    names = {part.name for part in profile.parts}
    whole = set(model._no_split_modules or ())
    for name, module in model.named_modules():
        if type(module).__name__ in whole:
            assert not any(part.startswith(name + ".") for part in names), name


def test_a_quantizer_that_wants_to_be_whole_is_no_stack() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(8, 8))) for _ in range(6))

    class Codec(nn.Module):
        _no_split_modules = ("Whole",)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(2, 2))) for _ in range(3))
            self.quantizer = Whole()

    profile = profile_model(Codec())
    assert [p.name for p in profile.parts] == ["blocks.0", "blocks.1", "blocks.2", "quantizer"]


def test_adapters_change_no_stack() -> None:
    plain, adapted = profiled("qwen3_vl")[1], skeleton("qwen3_vl")
    profile = profile_model(add_lora(adapted, LoraSettings(r=2, targets=["vision", "connector"])))
    assert [p.name for p in profile.parts] == [p.name for p in plain.parts]
    assert profile.towers == plain.towers


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("model_type", [*IMAGE_TEXT, *AUDIO])
def test_a_split_puts_every_part_somewhere(model_type: str, gpus: int) -> None:
    _, profile = profiled(model_type)
    device_map, memory = spread(profile, *[2**30] * gpus)
    assert list(device_map) == [part.name for part in profile.parts]
    outside = {device_map[part.name] for part in profile.parts if not part.is_layer}
    assert outside == {"cuda:0"}, "embeddings, norms, connector and head share the primary device"
    order = [device_map[part.name] for part in profile.layers]
    assert order == sorted(order)
    assert len({*order, "cuda:0"}) == min(gpus, len(order) + 1)
    assert all(share.fits for share in memory.values())


def test_an_untied_head_goes_last_and_the_embeddings_of_audio_stay_first() -> None:
    _, profile = profiled("higgs_audio_v2")
    sizes = {part.name: part.parameters * 16 for part in profile.parts}
    primary = sizes["model.embed_tokens"] + sizes["model.embed_audio_tokens"]
    first = primary + 16 * sum(part.parameters for part in profile.layers[:1]) + 2**20
    device_map, memory = spread(profile, first, 2**30, work=Workload(max_length=1))
    assert device_map["model.embed_audio_tokens"] == device_map["model.embed_tokens"] == "cuda:0"
    assert device_map["audio_lm_head"] == device_map["model.norm"] == "cuda:1"
    assert all(share.fits for share in memory.values())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*IMAGE_TEXT, *AUDIO]),
    st.lists(st.integers(0, 2_000_000), min_size=2, max_size=8),
    st.booleans(),
)
def test_on_many_machines(model_type: str, sizes: list[int], training: bool) -> None:
    model, profile = profiled(model_type)
    device_map, memory = spread(profile, *sizes, work=Workload(max_length=8, training=training))
    order = [device_map[part.name] for part in profile.layers]
    assert order == sorted(order)
    plan = PlacementPlan(
        device="cuda:0",
        precision="fp32",
        scaler=False,
        weight_precision="fp32",
        strategy="split",
        device_map=device_map,
    )
    held = dict.fromkeys(memory, 0)
    for name, parameter in model.named_parameters():
        held[plan.device_of(name)] += 4 * parameter.numel()
    assert held == {device: share.weights for device, share in memory.items()}, "each parameter once"
    blocks: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        for part in profile.layers:
            if name.startswith(part.name + "."):
                blocks.setdefault(part.name, set()).add(plan.device_of(name))
    assert all(len(devices) == 1 for devices in blocks.values()), "no block is cut"
    for one, other in profile.ties:
        assert device_map[one] == device_map[other]
    whole = profile.share(
        profile.parts, "fp32", "fp32", Workload(max_length=8, training=training), capacity=0
    )
    if whole.needed <= sizes[0]:
        assert all(share.fits for share in memory.values()), "what fits on the first fits"


class Tied(nn.Module):
    """Layers 1 and 3 share a tensor, and so do the head and layer 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(4, 4))) for _ in range(6))
        self.head = nn.Linear(4, 4)
        self.layers[3][0][0].weight = self.layers[1][0][0].weight
        self.head.weight = self.layers[0][0][0].weight


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4000), min_size=2, max_size=6))
def test_what_shares_a_tensor_shares_a_device(sizes: list[int]) -> None:
    profile = profile_model(Tied())
    assert set(profile.ties) == {("layers.1", "layers.3"), ("layers.0", "head")}
    device_map, _ = spread(profile, *sizes, work=Workload(max_length=1))
    assert device_map["layers.1"] == device_map["layers.2"] == device_map["layers.3"]
    assert device_map["layers.0"] == device_map["head"]


def test_a_frozen_tower_keeps_nothing_for_the_backward_pass() -> None:
    work = Workload(max_length=16, patches=4096)
    language = profile_model(add_lora(skeleton("gemma3"), LoraSettings(r=2)))
    both = profile_model(add_lora(skeleton("gemma3"), LoraSettings(r=2, targets=["attention", "vision"])))

    def activations(profile: ModelProfile, **more: Any) -> int:
        changed = Workload(max_length=16, patches=4096, **more) if more else work
        return profile.share(profile.parts, "fp32", "fp32", changed, capacity=0).activations

    assert activations(both) > 2 * activations(language), "three layers are kept, not one"
    assert activations(both, gradient_checkpointing=True) < activations(both)
    assert activations(language) > activations(profiled("gemma3")[1], training=False) / 2


@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize("model_type", [*IMAGE_TEXT, *AUDIO])
def test_a_split_model_computes_what_the_whole_one_does(model_type: str, gpus: int) -> None:
    """The same products of the same shapes on virtual GPUs: equal bits, and the same tensors get a gradient."""
    torch.manual_seed(0)
    model, inputs = skeleton(model_type, device="cpu"), batch(model_type)
    expected = model(**inputs).logits
    expected.float().pow(2).mean().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    device_map, _ = spread(profile_model(model), *[2**30] * gpus)
    assert len(set(device_map.values())) == min(gpus, len(profile_model(model).layers) + 1)
    plan = PlacementPlan(
        device="cuda:0",
        precision="fp32",
        scaler=False,
        weight_precision="fp32",
        strategy="split",
        device_map=device_map,
    )
    with virtual_gpus(gpus), warnings.catch_warnings():
        warnings.simplefilter("error")
        split = place(model, plan)
        verify(split, plan)
        return_outputs(split)
        logits = split(**move(inputs, plan)).logits
        assert logits.device == torch.device("cuda:0")
        logits.float().pow(2).mean().backward()
        assert torch.equal(logits.detach().cpu(), expected.detach())
        assert {n for n, parameter in split.named_parameters() if parameter.grad is not None} == reached


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("llama", ["LlamaDecoderLayer"]),
        ("llava_onevision", ["Qwen2DecoderLayer", "SiglipEncoderLayer"]),
        ("qwen3_vl", ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]),
        ("gemma3", ["Gemma3DecoderLayer", "SiglipEncoderLayer"]),
    ],
)
def test_layers_are_sharded_by_the_classes_that_are_there(model_type: str, layers: list[str]) -> None:
    assert layer_classes(skeleton(model_type)) == layers
    adapted = add_lora(skeleton(model_type), LoraSettings(r=2))
    assert layer_classes(adapted.get_base_model()) == layers
