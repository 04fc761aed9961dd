"""A model and an adapter are filled by their files whole: what is left over, lacking or double is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.errors import RequestError
from trimtab.models import load_model
from trimtab.models.adapters import add_lora
from trimtab.models.kept_adapter import with_adapter
from trimtab.models.weight_files import INDEX, model_tensors
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
WEIGHTS = "model.safetensors"


def said(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / WEIGHTS
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def shards(tiny_model: Path, tmp_path: Path) -> list[Path]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder, max_shard_size="150KB")
    return sorted(folder.glob("*.safetensors"))


def fewer_layers(folder: Path) -> None:
    said(folder / "config.json", num_hidden_layers=1)


def a_bias(folder: Path) -> None:
    add(folder, **{f"model.layers.{n}.self_attn.q_proj.bias": torch.ones(64) for n in range(2)})


def a_head(folder: Path) -> None:
    add(folder, **{"score.weight": torch.ones(2, 64)})


def an_adapter(folder: Path) -> None:
    add(folder, **{"base_model.model.lm_head.lora_A.weight": torch.ones(2, 64)})


def scales(folder: Path) -> None:
    add(folder, **{"model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1)})


def tied(folder: Path) -> None:
    said(folder / "config.json", tie_word_embeddings=True)


def adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "elsewhere", "peft_type": "LORA"}'
    )


def a_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def overlapping(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    told = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(told).to_bytes(8, "little") + told + raw[end:])


def huge_header(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes((1 << 62).to_bytes(8, "little") + raw[8:])


@pytest.mark.parametrize(
    ("spoil", "found", "change"),
    [
        (
            fewer_layers,
            r"hold model\.layers\.1\..* and 6 more.*\n.*fewer layers",
            "model.ignore_weights=[model.layers.1]",
        ),
        (a_bias, "the layers that they belong to are there", "[model.layers.*.self_attn.q_proj.bias]"),
        (
            a_head,
            r"hold score\.weight, which LlamaForCausalLM has no place for",
            "model.ignore_weights=[score]",
        ),
        (an_adapter, "of an adapter", "merge the adapter"),
        (scales, "scales of quantised weights", "take the unquantised model"),
        (
            tied,
            r"ties lm_head\.weight to model\.embed_tokens\.weight.*differ",
            "tie_word_embeddings to false",
        ),
        (adapter_beside, "a model and an adapter_config", "a folder of its own"),
        (a_pipe, r"from model\.safetensors\n.*it is not a file", "fetch the weights again"),
        (overlapping, r"could not be loaded from model\.safetensors", "fetch the weights again"),
        (huge_header, r"from model\.safetensors\n.*header too large", "fetch the weights again"),
    ],
)
def test_weights_that_the_config_does_not_take_are_refused(
    folder: Path, spoil: Callable[[Path], None], found: str, change: str
) -> None:
    spoil(folder)
    with pytest.raises(RequestError, match=found) as refused:
        load_model(ModelSettings(name=str(folder)), PLAN)
    assert change in str(refused.value)


def test_what_is_left_out_by_wish_or_without_harm_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_head(folder)
    a_bias(folder)
    add(
        folder,
        **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "h.masked_bias": torch.ones(1)},
    )
    load_model(ModelSettings(name=str(folder), ignore_weights=["score", "*.q_proj.bias"]), PLAN)
    assert "left out model.layers.0.self_attn.q_proj.bias" in caplog.text
    assert "h.masked_bias of its files is computed, not read" in caplog.text


def test_a_head_that_is_tied_need_not_be_in_the_files(folder: Path) -> None:
    tied(folder)
    tensors = load_file(folder / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    model: Any = load_model(ModelSettings(name=str(folder)), PLAN)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shards_are_those_that_the_index_names(shards: list[Path]) -> None:
    folder = shards[0].parent
    index = folder / INDEX
    told = json.loads(index.read_text())
    settings = ModelSettings(name=str(folder))

    def refused(why: str) -> None:
        with pytest.raises(RequestError, match=why):
            load_model(settings, PLAN)

    assert len(model_tensors(folder, "") or {}) == len(told["weight_map"])
    first, second = load_file(shards[0]), load_file(shards[1])
    name = next(iter(second))
    save_file(first | {name: second[name] * 2}, shards[0], metadata={"format": "pt"})
    refused(rf"{name} is in {shards[0].name} and in {shards[1].name}")
    save_file(first, shards[0], metadata={"format": "pt"})
    save_file({n: t for n, t in second.items() if n != name}, shards[1], metadata={"format": "pt"})
    refused(rf"says that {shards[1].name} holds {name}, and it does not")
    shards[1].unlink()
    refused(rf"names {shards[1].name}.*\n.*it is not there")
    for bad in (
        "[" * 100_000,
        "[]",
        '{"weight_map": {"a": 1}, "metadata": {}}',
        json.dumps(told | {"metadata": None}),
    ):
        index.write_text(bad)
        refused(rf"{INDEX} cannot be read")
    for outside in ("../other.safetensors", str(shards[0])):
        index.write_text(json.dumps(told | {"weight_map": {"a": outside}}))
        refused("leads out of the model's folder")


def test_shards_that_the_loader_passes_over_are_said(
    folder: Path, shards: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    sharded, stray = shards[0].parent, "model-00009-of-00009.safetensors"
    load_model(ModelSettings(name=str(sharded)), PLAN)
    assert "not read" not in caplog.text
    shutil.copy(shards[0], sharded / stray)
    load_model(ModelSettings(name=str(sharded)), PLAN)
    assert (
        f"{stray} lie beside the model's weights and are not read: the loader takes what {INDEX}"
        in caplog.text
    )
    caplog.clear()
    for file in (*shards, sharded / INDEX):
        shutil.copy(file, folder)
    before = load_file(folder / WEIGHTS)["lm_head.weight"]
    save_file({name: tensor * 2 for name, tensor in load_file(shards[0]).items()}, folder / shards[0].name)
    model: Any = load_model(ModelSettings(name=str(folder)), PLAN)
    assert torch.equal(model.lm_head.weight, before)
    assert f"not read: the loader takes {WEIGHTS} alone" in caplog.text
    assert shards[0].name in caplog.text


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    model = load_model(ModelSettings(name=str(tiny_model)), PLAN)
    add_lora(model, LoraSettings(r=4, targets=["q_proj"])).save_pretrained(str(folder))
    return folder


def test_an_adapter_goes_on_whole_or_not_at_all(tiny_model: Path, adapter: Path) -> None:
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    config_before, tensors, raw = config.read_text(), load_file(weights), weights.read_bytes()

    def put_on() -> Any:
        return with_adapter(load_model(ModelSettings(name=str(tiny_model)), PLAN), adapter)

    def refused(why: str) -> None:
        with pytest.raises(RequestError, match=why):
            put_on()

    assert put_on().peft_config["default"].r == 4
    name = sorted(tensors)[0]
    save_file({n: t for n, t in tensors.items() if n != name}, weights)
    refused(f"lacks {name}")
    save_file(tensors | {name.replace("q_proj", "o_proj"): tensors[name].clone()}, weights)
    refused(r"holds .*o_proj\.lora_A\.weight, which LlamaForCausalLM has no place for")
    weights.write_bytes(raw[:-8])
    refused(r"could not be loaded from adapter_model\.safetensors")
    weights.write_bytes(raw)
    for values, why in (
        ({"r": 8}, "does not go on LlamaForCausalLM"),
        ({"r": 0}, "rank is a whole number"),
        ({"peft_type": "IA3"}, "reads LoRA adapters"),
        ({"target_modules": ["nonesuch"]}, "not found in the base model"),
        ({"target_modules": "((("}, "does not go on LlamaForCausalLM"),
    ):
        config.write_text(config_before)
        said(config, **values)
        refused(why)
    config.write_text("{" * 100_000)
    refused(r"adapter_config\.json cannot be read")
    config.unlink()
    refused(r"adapter_config\.json cannot be read")
