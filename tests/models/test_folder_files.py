"""A model's folder whose config has sizes that no model has, or whose files are none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.models.load import load_skeleton, load_tokenizer


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(folder: Path, file: str = "config.json", **values: Any) -> ModelSettings:
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps(content))
    return ModelSettings(name=str(folder))


SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "head_dim",
)


@pytest.mark.parametrize("value", [0, -1, 10**12, 10**30, "64", True, 1.5, float("nan")])
@pytest.mark.parametrize("key", SIZES)
def test_sizes_that_no_model_has(folder: Path, key: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"config\.json: {key} is") as raised:
        load_skeleton(change(folder, **{key: value}))
    assert str(raised.value).count("\n") == 2


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 63},
        {"hidden_size": [1]},
        {"vocab_size": None},
        {"hidden_act": "nosuch"},
        {"model_type": ["llama"]},
        {"pad_token_id": 10**9},
        {"rms_norm_eps": "small"},
        {"rope_scaling": 3},
    ],
)
def test_what_a_library_answers_with_any_error_is_told(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="could not be loaded"):
        load_skeleton(change(folder, **values))


def test_a_kernel_from_the_hub_is_not_fetched(folder: Path) -> None:
    with pytest.raises(RequestError, match="code that would be fetched"):
        load_skeleton(change(folder, _attn_implementation="somebody/kernel"))


def test_files_that_are_none(folder: Path) -> None:
    settings = ModelSettings(name=str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "added_tokens.json")
    with pytest.raises(RequestError, match="is no file"):
        load_tokenizer(settings)
    (folder / "added_tokens.json").unlink()
    (folder / "generation_config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(RequestError, match="stands twice"):
        load_tokenizer(settings)


def test_a_tokenizers_wrong_settings(folder: Path) -> None:
    settings = change(folder, "tokenizer_config.json", model_max_length="long")
    with pytest.raises(RequestError, match="tokenizer could not be loaded"):
        load_tokenizer(settings)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="tokenizer could not be loaded"):
        load_tokenizer(settings)
