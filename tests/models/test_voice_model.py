"""Higgs Audio v2: its parts by role, what is refused of its checkpoints, and one without a text head."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2ForConditionalGeneration

from tiny_models import batch, config
from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.errors import RequestError
from trimtab.models import AUDIO, load_model, load_skeleton
from trimtab.models.adapters import add_lora
from trimtab.models.load import left_out
from trimtab.placement import PlacementPlan
from trimtab.placement.gradients import adapter_flows, gradient_table

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def adapted_by(model: Any, targets: str | list[str]) -> list[str]:
    tuned = add_lora(copy.deepcopy(model), LoraSettings(r=2, targets=targets), AUDIO).get_base_model()
    return [n for n, m in tuned.named_modules() if isinstance(m, LoraLayer)]


def voice_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return HiggsAudioV2ForConditionalGeneration(config("higgs_audio_v2", **changes), use_text_head=True)


def test_each_mlp_of_a_model_that_speaks_by_its_role() -> None:
    model = voice_model()
    names = {
        role: set(adapted_by(model, role))
        for role in ("mlp", "text_mlp", "audio_mlp", "all-linear", "attention")
    }
    layers = len(model.model.layers)
    kinds = ("gate", "up", "down")
    assert names["text_mlp"] == {f"model.layers.{n}.mlp.{k}_proj" for n in range(layers) for k in kinds}
    assert names["audio_mlp"] == {
        f"model.layers.{n}.audio_mlp.{k}_proj" for n in range(layers) for k in kinds
    }
    assert names["mlp"] == names["text_mlp"] | names["audio_mlp"]
    assert names["all-linear"] == names["mlp"] | names["attention"]
    assert adapted_by(model, ["audio_mlp:1-2:down_proj", "audio_head"]) == [
        "model.layers.1.audio_mlp.down_proj",
        "model.layers.2.audio_mlp.down_proj",
        "audio_lm_head",
    ]


@pytest.mark.parametrize(("role", "moves"), [("text_mlp", "text"), ("audio_mlp", "sound")])
def test_an_adapter_on_one_mlp_leaves_the_places_of_the_other_as_they_were(role: str, moves: str) -> None:
    """In a single layer: what another place says goes through attention, which comes before the MLPs."""
    model = voice_model(num_hidden_layers=1).eval()
    rows = batch("higgs_audio_v2")
    before = model.model(**rows).last_hidden_state.detach()
    tuned = add_lora(model, LoraSettings(r=2, targets=role), AUDIO)
    with torch.no_grad():
        for name, tensor in tuned.named_parameters():
            if "lora_B" in name:
                tensor.normal_()
    after = tuned.get_base_model().model(**rows).last_hidden_state.detach()
    sound = rows["input_ids"] == 100
    changed = (before != after).any(-1)
    assert torch.equal(changed, sound if moves == "sound" else ~sound)


def test_the_audio_head_is_trained_and_saved_as_an_adapter(tmp_path: Path) -> None:
    tuned = add_lora(voice_model(), LoraSettings(r=2, targets=["attention", "audio_head"]), AUDIO)
    trained = {n for n, p in tuned.named_parameters() if p.requires_grad}
    assert {n.split("lora_")[1] for n in trained if "audio_lm_head" in n} == {
        "A.default.weight",
        "B.default.weight",
    }
    with torch.no_grad():
        for name, tensor in tuned.named_parameters():
            if "lora_B" in name:
                tensor.normal_()
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(voice_model(), str(tmp_path)).eval()
    rows = batch("higgs_audio_v2")
    torch.testing.assert_close(again(**rows).logits, tuned.eval()(**rows).logits)
    plain = voice_model().eval()
    assert not torch.allclose(plain(**rows).logits, tuned(**rows).logits)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(**rows).logits, tuned(**rows).logits, rtol=1e-3, atol=1e-3)


def test_the_gradient_table_tells_the_parts_of_a_model_that_speaks() -> None:
    tuned = add_lora(voice_model(), LoraSettings(r=2, targets=["all-linear", "audio_head"]), AUDIO)
    rows = batch("higgs_audio_v2")
    tuned(**rows, labels=rows["input_ids"], audio_labels=rows["audio_input_ids"]).loss.backward()
    table = gradient_table(adapter_flows(tuned))
    assert [line.split("  ")[0] for line in table] == [
        "language model: attention",
        "language model: text MLP",
        "audio MLP",
        "audio head",
    ]
    assert [line.split(" of ")[1].split()[0] for line in table] == ["16", "12", "12", "1"]


def test_a_checkpoint_without_text_head_is_loaded_without_one(tmp_path: Path) -> None:
    HiggsAudioV2ForConditionalGeneration(config("higgs_audio_v2")).save_pretrained(tmp_path)
    loaded: Any = load_model(ModelSettings(name=str(tmp_path)), PLAN, AUDIO)
    assert loaded.text_lm_head is None
    (said,) = left_out(loaded, AUDIO)
    assert "no text head" in said
    assert not any("text_lm_head" in name for name in loaded.state_dict())
    # Nothing that is made of a word behind the last attention would ever be read.
    last = f"model.layers.{len(loaded.model.layers) - 1}."
    text = {n.rpartition(".mlp.")[0] for n in adapted_by(loaded, "text_mlp")}
    assert text == {f"model.layers.{n}" for n in range(len(loaded.model.layers) - 1)}
    assert [n for n in adapted_by(loaded, "audio_mlp") if n.startswith(last)]


def test_a_checkpoint_that_lacks_more_than_a_text_head_is_refused(tmp_path: Path) -> None:
    HiggsAudioV2ForConditionalGeneration(config("higgs_audio_v2")).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    del held["audio_lm_head.weight"]
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"lack audio_lm_head\.weight"):
        load_model(ModelSettings(name=str(tmp_path)), PLAN, AUDIO)


def test_codebooks_without_room_for_bos_and_eos_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    config("higgs_audio_v2", codebook_size=1024).save_pretrained(tmp_path)
    for load in (lambda s: load_skeleton(s, AUDIO), lambda s: load_model(s, PLAN, AUDIO)):
        with pytest.raises(RequestError, match="codebook_size=1024") as refused:
            load(ModelSettings(name=str(tmp_path)))
        assert "set codebook_size to 1026" in str(refused.value)


def test_bosons_own_format_is_known_and_refused(tmp_path: Path) -> None:
    own = {"model_type": "higgs_audio", "architectures": ["HiggsAudioModel"], "audio_num_codebooks": 8}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(RequestError, match="format of Boson's own code"):
        load_skeleton(ModelSettings(name=str(tmp_path)), AUDIO)
