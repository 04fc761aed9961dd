"""The built-in model that speaks: a folder like any other, made once, in the words of its own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab.data
from trimtab.config.schema import ModelSettings
from trimtab.models import AUDIO, load_skeleton
from trimtab.models import tiny_voice as tiny
from trimtab.models.load import load_model_config, load_tokenizer, model_source

SETTINGS = ModelSettings(name="tiny-voice")
VOICES = Path(trimtab.data.__file__).parent / "shipped" / "voices"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Path(model_source(SETTINGS))


def loaded(folder: Path) -> Any:
    model, report = AUDIO.auto.from_pretrained(folder, output_loading_info=True, **AUDIO.options)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert not report["unexpected_keys"]
    return model


def test_it_is_made_once(folder: Path) -> None:
    made = (folder / "model.safetensors").stat()
    assert Path(model_source(SETTINGS)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no scratch folder is left"


def test_its_weights_follow_from_its_seed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.random.get_rng_state()
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    again = loaded(Path(model_source(SETTINGS)))
    assert torch.equal(torch.random.get_rng_state(), state), "the seed of whoever asks stays as it was"
    first = loaded(folder).state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.state_dict().items())


def test_plan_knows_its_shape_without_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "none"))
    skeleton = load_skeleton(SETTINGS, AUDIO)
    assert not (tmp_path / "none").exists()
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}


def test_the_folder_has_the_shape_that_is_planned_with(folder: Path) -> None:
    skeleton, model = load_skeleton(SETTINGS, AUDIO), loaded(folder)
    shapes = {name: tensor.shape for name, tensor in skeleton.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in model.named_parameters()}
    assert model.text_lm_head is not None
    assert model.config.codebook_size == 1026


@pytest.mark.parametrize(
    "text", ["Generate audio following instruction.", "redo 42 Ünïcode\nx  y ", "<no token>", "user"]
)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = tiny.tiny_voice_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def shipped() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((VOICES / "metadata.json").read_text(encoding="utf-8"))
    return rows


def test_every_word_of_the_shipped_clips_is_one_token() -> None:
    tokenizer = tiny.tiny_voice_tokenizer()
    texts = {row["text"] for row in shipped()}
    assert len(texts) > 5
    for text in texts:
        assert len(tokenizer(text)["input_ids"]) == len(text.replace(".", " .").split())


def test_tokens_and_config_agree(folder: Path) -> None:
    tokenizer, config = load_tokenizer(SETTINGS), load_model_config(SETTINGS)
    for name, token in {
        "audio_token_id": "<|AUDIO_OUT|>",
        "audio_bos_token_id": "<|audio_out_bos|>",
        "audio_delay_token_id": "<|reserved_special_token_6|>",
        "pad_token_id": tokenizer.pad_token,
        "eos_token_id": "<|eot_id|>",
    }.items():
        assert tokenizer.convert_ids_to_tokens(getattr(config, name)) == token
        assert (
            tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"].count(getattr(config, name)) == 1
        )
    assert len(tokenizer) == config.vocab_size


SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Be loud."}]}
SCENE = {"role": "scene", "content": [{"type": "text", "text": "A quiet room."}]}
USER = {"role": "user", "content": [{"type": "text", "text": "We are here."}]}
CLIP = {"role": "assistant", "content": [{"type": "audio"}]}
_H = "<|start_header_id|>{}<|end_header_id|>".format
_SOUND = "<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>"


@pytest.mark.parametrize(
    ("turns", "prompt", "text"),
    [
        (
            [SYSTEM, USER, CLIP],
            False,
            _H("system")
            + "Be loud.<|eot_id|>"
            + _H("user")
            + "We are here.<|eot_id|>"
            + _H("assistant")
            + _SOUND,
        ),
        (
            [SYSTEM, SCENE, USER],
            True,
            _H("system")
            + "Be loud.<|scene_desc_start|>A quiet room.<|scene_desc_end|><|eot_id|>"
            + _H("user")
            + "We are here.<|eot_id|>"
            + _H("assistant")
            + "<|audio_out_bos|>",
        ),
        ([{"role": "user", "content": " Hello "}], False, _H("user") + "Hello<|eot_id|>"),
    ],
)
def test_a_conversation_as_its_template_writes_it(turns: list[Any], prompt: bool, text: str) -> None:
    tokenizer = tiny.tiny_voice_tokenizer()
    made = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    assert made == "<|begin_of_text|>" + text
