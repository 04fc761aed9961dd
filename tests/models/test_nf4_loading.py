"""Which layers are held in NF4, and that a model read straight into it is the model packed afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tiny_models import IMAGE_TEXT, skeleton
from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.hardware import probe
from trimtab.models.load import load_model, load_skeleton
from trimtab.models.nf4_linear import Nf4Linear
from trimtab.models.nf4_loading import nf4_layers, pack_model
from trimtab.placement import PlacementPlan, PlacementRequest, profile_model, resolve


@pytest.fixture(scope="module")
def plan() -> PlacementPlan:
    return resolve(PlacementRequest(device="cpu"), probe())


def _settings(folder: Path, **more: Any) -> ModelSettings:
    return ModelSettings(name=str(folder), quantize="nf4", **more)


def test_a_model_is_packed_while_it_is_read(tiny_model: Path, plan: PlacementPlan) -> None:
    read = load_model(_settings(tiny_model), plan)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    names = nf4_layers(plain)
    assert len(names) == 2 * 7
    assert pack_model(plain) == 14
    assert [name for name, module in read.named_modules() if isinstance(module, Nf4Linear)] == names
    assert type(read.lm_head) is nn.Linear
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(read(ids).logits, plain(ids).logits)
    assert all(not p.requires_grad for n, p in read.named_parameters() if "_proj" in n)


def test_the_plan_counts_what_is_packed(tiny_model: Path) -> None:
    plain = profile_model(load_skeleton(ModelSettings(name=str(tiny_model))))
    packed = profile_model(load_skeleton(_settings(tiny_model)))
    assert packed.parameters == plain.parameters
    assert plain.four_bit == 0
    assert packed.four_bit == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    plan = resolve(PlacementRequest(device="cpu"), probe(), packed)
    saved = resolve(PlacementRequest(device="cpu"), probe(), plain).memory["cpu"].weights
    assert saved - plan.memory["cpu"].weights == pytest.approx(packed.four_bit * (4 - 0.516), rel=1e-2)
    assert "held in four bits" in plan.reasons["weights"]


def test_towers_and_routers_stay_as_they_are() -> None:
    wide = {"hidden_size": 64, "intermediate_size": 128}
    shape = IMAGE_TEXT["llava_onevision"]
    model = skeleton(
        "llava_onevision",
        text_config=shape["text_config"] | wide,
        vision_config=shape["vision_config"] | wide,
    )
    names = nf4_layers(model)
    assert len(names) == 4 * 7
    assert all("language_model" in name for name in names)
    layer = nn.Module()
    layer.attention, layer.mlp = nn.Module(), nn.Module()
    layer.attention.q_proj, layer.mlp.gate = nn.Linear(64, 64), nn.Linear(64, 4)
    layer.mlp.router, layer.mlp.up_proj, layer.mlp.odd = (
        nn.Linear(64, 4),
        nn.Linear(64, 64),
        nn.Linear(80, 64),
    )
    stack = nn.Module()
    stack.layers = nn.ModuleList([layer])
    assert nf4_layers(stack) == ["layers.0.attention.q_proj", "layers.0.mlp.up_proj"]


def _copy(tiny_model: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 64)),
        ("model.layers.1.mlp.down_proj.weight", None),
        ("model.norm.weight", (32,)),
    ],
)
def test_weights_that_do_not_fill_the_model_are_refused(
    name: str, shape: tuple[int, ...] | None, tiny_model: Path, tmp_path: Path, plan: PlacementPlan
) -> None:
    folder, tensors = _copy(tiny_model, tmp_path)
    tensors.pop(name)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=name.replace(".", r"\.")):
        load_model(_settings(folder), plan)


def test_a_model_that_comes_quantised_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder, _ = _copy(tiny_model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"quantised already \(fp8\)"):
        load_skeleton(_settings(folder))


def test_a_model_of_bitsandbytes_is_refused_with_the_way_out(tiny_model: Path, tmp_path: Path) -> None:
    folder, _ = _copy(tiny_model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"set model\.quantize=nf4"):
        load_skeleton(ModelSettings(name=str(folder)))


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=32)).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="no layer that can be held in four bits"):
        load_skeleton(_settings(tmp_path))
