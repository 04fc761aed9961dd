"""A merged model that speaks: its text head stays, the adapter is in it, and what makes sound of codes is beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import _finish, byte_level_tokenizer
from peft import PeftModel
from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

from tiny_models import batch, config
from trimtab.config import Config
from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.export.run import export_run
from trimtab.models import AUDIO
from trimtab.models.adapters import add_lora
from trimtab.models.codec import _named_by_processor
from trimtab.models.spectral_codec import SpectralCodec, SpectralCodecConfig


def made_run(folder: Path, *, head: bool = True) -> tuple[Path, Path]:
    """A base model and a finished LoRA run of it."""
    base, run = folder / "base", folder / "run"
    torch.manual_seed(0)
    model: Any = HiggsAudioV2ForConditionalGeneration(config("higgs_audio_v2"), use_text_head=head)
    model.save_pretrained(base)
    byte_level_tokenizer("qwen2").save_pretrained(base)
    tuned = add_lora(model, LoraSettings(r=2, targets=["attention", "audio_mlp", "audio_head"]), AUDIO)
    with torch.no_grad():
        for name, tensor in tuned.named_parameters():
            if "lora_B" in name:
                tensor.normal_(0, 0.05)
    tuned.save_pretrained(run / "adapter")
    byte_level_tokenizer("qwen2").save_pretrained(run / "adapter")
    settings = {"recipe": "voice", "method": "lora", "model": {"name": str(base)}}
    return base, _finish(run, Config.model_validate(settings))


@pytest.mark.parametrize("head", [True, False])
def test_the_merged_model_is_the_adapted_one_with_the_heads_that_it_had(tmp_path: Path, head: bool) -> None:
    base, run = made_run(tmp_path, head=head)
    merged = export_run(run, "merged").folder
    again: Any = HiggsAudioV2ForConditionalGeneration.from_pretrained(merged, use_text_head=head).eval()
    plain: Any = HiggsAudioV2ForConditionalGeneration.from_pretrained(base, use_text_head=head)
    tuned: Any = PeftModel.from_pretrained(plain, str(run / "adapter")).eval()
    rows = batch("higgs_audio_v2")
    with torch.no_grad():
        torch.testing.assert_close(again(**rows).logits, tuned(**rows).logits, rtol=1e-3, atol=1e-4)
    if head:
        assert torch.equal(again.text_lm_head.weight, plain.text_lm_head.weight)
    assert json.loads((merged / "config.json").read_text())["architectures"] == [
        "HiggsAudioV2ForConditionalGeneration"
    ]
    assert AutoTokenizer.from_pretrained(merged)("a")["input_ids"]


def test_a_learned_codec_goes_along_and_is_found_there(tmp_path: Path) -> None:
    _, run = made_run(tmp_path)
    SpectralCodec(SpectralCodecConfig(num_quantizers=4)).save_pretrained(run / "codec")
    merged = export_run(run, "merged").folder
    settings = Config(recipe="voice", model=ModelSettings(name=str(merged)))
    assert _named_by_processor(settings) == str(merged / "codec")
    kept = (merged / "codec" / "config.json").read_text()
    assert kept == (run / "codec" / "config.json").read_text()


def test_the_base_models_own_codec_stays_named(tmp_path: Path) -> None:
    base, run = made_run(tmp_path)
    said = {"processor_class": "X", "audio_tokenizer": {"audio_tokenizer_name_or_path": "bosonai/its-codec"}}
    (base / "processor_config.json").write_text(json.dumps(said))
    merged = export_run(run, "merged").folder
    assert json.loads((merged / "processor_config.json").read_text()) == said
    assert (
        _named_by_processor(Config(recipe="voice", model=ModelSettings(name=str(merged))))
        == "bosonai/its-codec"
    )
