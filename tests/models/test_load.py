"""Loading: whole weights or none, and an error that names the setting for what can be wrong with a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, T5Config

import tiny_models
import trimtab
from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.models import load_model, load_skeleton, load_tokenizer, model_source
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def drop_a_layer(folder: Path) -> None:
    kept = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if "layers.1." not in name}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def widen_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))


def cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])


def leave_a_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "found", "change"),
    [
        (drop_a_layer, r"its weights lack model\.layers\.1\..* and 6 more", "a whole causal language model"),
        (
            widen_the_config,
            r"its weights lack .*mlp.*, or have them in another shape",
            "config.json that belongs",
        ),
        (cut_off, "its weights could not be loaded", "fetch the weights again"),
        (leave_a_pointer, "its weights could not be loaded", "git lfs pull"),
        (pickle, "its weights could not be loaded", "does not unpickle"),
    ],
)
def test_weights_that_are_not_whole_are_refused(
    folder: Path, spoil: Callable[[Path], None], found: str, change: str
) -> None:
    settings = ModelSettings(name=str(folder))
    assert load_model(settings, PLAN).config.num_hidden_layers == 2
    spoil(folder)
    with pytest.raises(RequestError, match=found) as refused:
        load_model(settings, PLAN)
    assert change in str(refused.value)


def test_attention_that_is_not_there_is_the_settings_fault(folder: Path) -> None:
    for name in ("nonesuch", *(["flash_attention_2"] if find_spec("flash_attn") is None else [])):
        with pytest.raises(RequestError, match=r"leave model\.attn_implementation out"):
            load_model(ModelSettings(name=str(folder), attn_implementation=name), PLAN)


def test_a_model_of_another_kind_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    T5Config(d_model=16).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="choose a causal language model"):
        load_skeleton(ModelSettings(name=str(tmp_path)))


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no config\.json"):
        model_source(ModelSettings(name=str(tmp_path)))
    with pytest.raises(RequestError, match="no such folder"):
        model_source(ModelSettings(name=str(tmp_path / "nothing")))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RequestError, match=r"config\.json is not valid JSON"):
        load_skeleton(ModelSettings(name=str(tmp_path)))


def test_a_folder_without_a_tokenizer_and_one_of_an_unknown_kind_say_what_to_mend(folder: Path) -> None:
    settings = ModelSettings(name=str(folder))
    for file in (*folder.glob("tokenizer*"), *folder.glob("vocab*")):
        file.unlink()
    with pytest.raises(RequestError, match="the folder has no tokenizer") as refused:
        load_tokenizer(settings)
    assert "connection" not in str(refused.value)
    (folder / "config.json").write_text('{"model_type": "llamma"}')
    with pytest.raises(RequestError, match=r"correct model_type in the model's config\.json"):
        load_skeleton(settings)


def test_a_tokenizer_that_is_made_from_nothing_is_none(tmp_path: Path) -> None:
    GPT2Config(n_layer=1, vocab_size=50304).save_pretrained(tmp_path)
    settings = ModelSettings(name=str(tmp_path))
    with pytest.raises(RequestError, match="the folder has no tokenizer"):
        load_tokenizer(settings)
    with trimtab.virtual_gpus(1, shapes=True):
        assert len(load_tokenizer(settings)) > 40_000  # the built-in model's
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(RequestError, match="no words: its vocabulary is not there"):
        load_tokenizer(settings)


def test_by_shapes_a_model_without_a_tokenizer_has_its_rows_read_by_the_built_in_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = ModelSettings(name=str(folder)), list[str]()
    monkeypatch.setattr("trimtab.models.load.rehearsal_proves_not", said.append)
    config = json.loads((folder / "config.json").read_text())
    with trimtab.virtual_gpus(1, shapes=True):
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(RequestError, match="tokenizer could not be loaded"):
            load_tokenizer(settings)  # damaged is not absent
        for file in (*folder.glob("tokenizer*"), *folder.glob("vocab*")):
            file.unlink()
        with pytest.raises(RequestError, match="the folder has no tokenizer"):
            load_tokenizer(settings)  # its ids would be beyond the model's words
        assert said == []
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 128256}))
        tokenizer = load_tokenizer(settings)
    assert tokenizer("words").input_ids == load_tokenizer(ModelSettings(name="smollm2"))("words").input_ids
    assert tokenizer.chat_template is not None
    assert tokenizer.pad_token is not None
    assert len(said) == 1
    assert "how long they are is not proven" in said[0]
    with pytest.raises(RequestError, match="the folder has no tokenizer"):
        load_tokenizer(settings)


def test_a_chat_template_that_is_not_utf8(tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }} é", encoding="utf-8")
    settings = ModelSettings(name=str(tiny_model), chat_template=str(template))
    assert load_tokenizer(settings).chat_template.endswith("é")
    template.write_text("{{ messages[0].content }} é", encoding="latin-1")
    with pytest.raises(RequestError, match="save the file as UTF-8"):
        load_tokenizer(settings)


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(RequestError, match="set TRIMTAB_CACHE to a folder of yours"):
        model_source(ModelSettings())


@pytest.mark.virtual_gpus(4)
def test_a_split_model_takes_its_inputs_where_the_plan_says(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_models.skeleton("llama", "cpu", num_hidden_layers=4).save_pretrained(folder)
    layers = {f"model.layers.{n}": f"cuda:{n}" for n in range(4)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cuda:2")
    plan = PlacementPlan(
        device="cuda:2",
        precision="fp32",
        scaler=False,
        weight_precision="fp32",
        strategy="split",
        device_map=layers | rest,
    )
    model: Any = load_model(ModelSettings(name=str(folder)), plan)
    assert str(model._hf_hook.execution_device) == "cuda:2"
